/* SPDX-License-Identifier: Apache-2.0 */
/* A stranger's side of a handshake on a new TCP connection. Whatever it sends, nobody waits for it
 * after it has closed the connection, and whoever does not know the secret is not let in.
 *
 * Input: a byte (1: this side has a secret; 2: this side dials), then what the stranger sends. */
#include "fuzz.h"

#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "comm/tcp/tcp.h"

enum { OWN = 3, OTHER = 7, LIMIT_MS = 10000 };

static enum ckpt_handshake_result go_on(struct ckpt_handshake *h)
{
    enum ckpt_handshake_result r;
    bool moved;

    while ((r = ckpt_handshake_step(h, &moved)) == CKPT_HANDSHAKE_WAITING)
        ;
    return r;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const struct ckpt_greeting g = {
        .magic = CKPT_GREETING, .version = CKPT_TCP_VERSION, .token = {1, 2}, .from = OWN};
    const unsigned how = size ? data[0] : 0;
    struct ckpt_tcp_contact contact;
    struct ckpt_handshake h;
    bool secret = false;
    int fd[2];

    if (how & 1)
        (void)setenv("CKPTFS_SECRET", "a secret of a fuzz target", 1);
    else
        (void)unsetenv("CKPTFS_SECRET");
    if (ckpt_secret_is_set(&secret, NULL) < 0)
        return 0;
    MUST(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fd) == 0);
    if (size > 1)
        (void)!send(fd[1], data + 1, size - 1 < 4096 ? size - 1 : 4096, MSG_NOSIGNAL);
    (void)shutdown(fd[1], SHUT_WR);
    if (how & 2) {
        ckpt_handshake_dial(&h, fd[0], &g, OTHER, ckpt_now_ms() + LIMIT_MS);
        h.stage = CKPT_HANDSHAKE_ANSWER; /* the greeting is sent */
        if (go_on(&h) == CKPT_HANDSHAKE_ASKED) {
            MUST(!secret && h.its.from == OTHER && memcmp(h.its.token, g.token, 16) == 0);
            (void)ckpt_handshake_confirm(&h, 0, NULL);
        }
    } else {
        ckpt_handshake_accept(&h, fd[0], ckpt_now_ms() + LIMIT_MS);
        if (go_on(&h) == CKPT_HANDSHAKE_ASKED) {
            MUST(h.its.magic == CKPT_GREETING && h.its.version == CKPT_TCP_VERSION);
            if (ckpt_handshake_answer(&h, OWN, 0) == CKPT_HANDSHAKE_WAITING &&
                go_on(&h) == CKPT_HANDSHAKE_DONE) {
                MUST(!secret && h.answered && strlen(h.in.confirmation.address) < CKPT_TCP_ADDRESS);
                if (ckpt_tcp_parse(h.in.confirmation.address, &contact, NULL) == 0)
                    MUST(strlen(contact.host) < sizeof contact.host);
            }
        }
    }
    ckpt_closep(&h.fd);
    (void)close(fd[1]);
    return 0;
}
