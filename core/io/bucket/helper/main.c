/* SPDX-License-Identifier: Apache-2.0 */
/* ckptfs-http: started by libckptfs, never by hand. */
#include <curl/curl.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <netdb.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/confine.h"
#include "base/mem.h"
#include "io/bucket/helper/helper.h"

/* No core file, and nobody of the same user may trace it or read its memory. */
static void hide(void)
{
    const struct rlimit none = {0, 0};

    (void)setrlimit(RLIMIT_CORE, &none);
    (void)prctl(PR_SET_DUMPABLE, 0);
}

/* ---- what the worker needs from files ---- */

/* The text of the certificates, malloc'ed; NULL: there are none. */
static int read_ca(const struct ckpt_site *site, char **ret, struct ckpt_err *err)
{
    static const char *const usual[] = {"/etc/ssl/certs/ca-certificates.crt",
                                        "/etc/pki/tls/certs/ca-bundle.crt",
                                        "/etc/ssl/ca-bundle.pem", "/etc/ssl/cert.pem"};
    const char *say = *site->ca_bundle ? site->ca_bundle : getenv("SSL_CERT_FILE");

    if (say && !(*ret = ckpt_read_text(say)))
        return ckpt_fail_errno(err, errno, "the certificates '%s' (AWS_CA_BUNDLE, SSL_CERT_FILE)",
                               say);
    if (say && !**ret)
        return ckpt_fail(err, CKPT_USAGE, "'%s' is no bundle of certificates", say);
    for (size_t i = 0; i < sizeof usual / sizeof *usual && !*ret; i++)
        *ret = ckpt_read_text(usual[i]);
    return 0;
}

/* The port of a URL, `otherwise` if it has none; 0: it can't be told. */
static unsigned port_of(const char *url, unsigned otherwise)
{
    CURLU *u = curl_url();
    char *port = NULL;
    const bool good = u && curl_url_set(u, CURLUPART_URL, url,
                                        CURLU_GUESS_SCHEME | CURLU_NON_SUPPORT_SCHEME) == CURLUE_OK;

    if (good && curl_url_get(u, CURLUPART_PORT, &port, 0) == CURLUE_OK)
        otherwise = (unsigned)strtoul(port, NULL, 10);
    curl_free(port);
    curl_url_cleanup(u);
    return good ? otherwise : 0;
}

static int allow_ports(int rules, const struct ckpt_site *site)
{
    static const char *const proxies[] = {"http_proxy", "https_proxy", "HTTPS_PROXY", "all_proxy",
                                          "ALL_PROXY"};
    const unsigned usual = ckpt_has_prefix(site->endpoint, "http:") ? 80 : 443;
    const unsigned store = *site->endpoint ? port_of(site->endpoint, usual) : usual;

    if (ckpt_landlock_port(rules, 53) < 0 || (store && ckpt_landlock_port(rules, store) < 0))
        return -1;
    for (size_t i = 0; i < sizeof proxies / sizeof *proxies; i++) {
        const char *say = getenv(proxies[i]);
        const unsigned port =
            say && *say ? port_of(say, ckpt_has_prefix(say, "https:") ? 443 : 1080) : 0;
        if (port && ckpt_landlock_port(rules, port) < 0)
            return -1;
    }
    return 0;
}

/* Names are looked up by the C library, which reads these, and loads modules. */
static int allow_names(int rules)
{
    static const char *const paths[] = {
        "/etc/hosts",    "/etc/resolv.conf", "/etc/nsswitch.conf", "/etc/host.conf",
        "/etc/gai.conf", "/etc/localtime",   "/etc/ld.so.cache",   "/lib",
        "/lib64",        "/usr/lib",         "/usr/lib64"};

    ckpt_cleanup(ckpt_freep) char *real = realpath("/etc/resolv.conf", NULL);
    char *slash = real ? strrchr(real, '/') : NULL;

    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++)
        if (ckpt_landlock_allow(rules, paths[i]) < 0)
            return -1;
    if (slash) /* a service replaces it in its own folder, when networks come and go */
        *slash = '\0';
    if (slash && strcmp(real, "/etc") != 0 && ckpt_landlock_allow(rules, real) < 0)
        return -1;
    return CKPT_LEAKS_ARE_LOOKED_FOR ? ckpt_landlock_allow(rules, "/proc") : 0;
}

/* Let the C library load now what it loads at the first look-up of a name. */
static void load_resolver(void)
{
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM};
    struct addrinfo *found = NULL;

    if (getaddrinfo("localhost", "80", &hints, &found) == 0)
        freeaddrinfo(found);
}

static int confine(const struct ckpt_site *site, struct ckpt_err *err)
{
    const unsigned version = ckpt_landlock_version();
    ckpt_cleanup(ckpt_closep) int rules = -1;

    struct __user_cap_header_struct who = {_LINUX_CAPABILITY_VERSION_3, 0};
    const struct __user_cap_data_struct none[2] = {{0}, {0}};

    load_resolver();
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 || syscall(SYS_capset, &who, none) < 0)
        return ckpt_fail_errno(err, errno, "giving up privileges");
    if (version > 0) {
        if (ckpt_landlock_begin(version, &rules, err) < 0)
            return -1;
        if (allow_names(rules) < 0 || (version >= 4 && allow_ports(rules, site) < 0))
            return ckpt_fail_errno(err, errno, "adding a Landlock rule");
        if (ckpt_landlock_enter(rules, err) < 0)
            return -1;
    }
    (void)ckpt_seccomp_enter(true);
    return 0;
}

/* ---- the two processes ---- */

enum {
    MOST_WORKERS = 8, /* that are killed, or crash, one after the other ... */
    SOON_MS = 60000,  /* ... and none of them so late */
};

/* Answer every question with the same error. */
static int refuse_all(const struct ckpt_err *err)
{
    struct ckpt_wire_ask q;
    struct {
        struct ckpt_wire_answer a;
        char text[CKPT_ERR_TEXT];
    } to = {{.code = err->code}, ""};

    memcpy(to.text, err->text, sizeof to.text);
    while (recv(CKPT_WIRE_SOCKET, &q, sizeof q, 0) > 0) { /* the rest of a message is lost */
        to.a.id = q.id;
        if (send(CKPT_WIRE_SOCKET, &to, sizeof to.a + strlen(to.text) + 1, MSG_NOSIGNAL) < 0)
            break;
    }
    return 1;
}

static int work(const struct ckpt_wire_setup *setup, unsigned number, const struct ckpt_site *site,
                int keeper)
{
    ckpt_cleanup(ckpt_freep) char *ca = NULL;
    struct ckpt_err err = {0};
    void *memory =
        mmap(NULL, setup->memory, PROT_READ | PROT_WRITE, MAP_SHARED, CKPT_WIRE_MEMORY, 0);

    (void)close(CKPT_WIRE_MEMORY);
    if (memory == MAP_FAILED)
        (void)ckpt_fail_errno(&err, errno, "mapping the memory of blocks");
    else if (read_ca(site, &ca, &err) == 0 && confine(site, &err) == 0)
        return ckpt_worker_run(setup, number, site, ca, keeper, memory);
    return refuse_all(&err);
}

/* Find credentials each time that the worker asks. */
static int keep(const struct ckpt_site *site, int worker)
{
    struct ckpt_secret *s =
        mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char byte;

    if (s == MAP_FAILED)
        return 1;
    (void)madvise(s, sizeof *s, MADV_DONTDUMP);
    while (recv(worker, &byte, 1, 0) == 1) {
        explicit_bzero(s, sizeof *s);
        ckpt_secret_find(site, s);
        const bool sent = send(worker, s, sizeof *s, MSG_NOSIGNAL) == (ssize_t)sizeof *s;
        explicit_bzero(s, sizeof *s);
        if (!sent)
            break;
    }
    return 0;
}

int main(void)
{
    struct ckpt_wire_setup setup;
    struct ckpt_site site = {0};
    struct ckpt_err err = {0};
    int pair[2];

    hide();
#ifdef SYS_close_range
    (void)syscall(SYS_close_range, CKPT_WIRE_MEMORY + 1, ~0U, 0);
#endif
    if (recv(CKPT_WIRE_SOCKET, NULL, 0, MSG_PEEK | MSG_DONTWAIT) < 0 && errno != EAGAIN) {
        (void)fprintf(stderr, "ckptfs-http is started by ckptfs, to read from buckets\n");
        return 2;
    }
    (void)signal(SIGPIPE, SIG_IGN);
    (void)fcntl(CKPT_WIRE_SOCKET, F_SETFD, FD_CLOEXEC); /* credential_process has neither */
    (void)fcntl(CKPT_WIRE_MEMORY, F_SETFD, FD_CLOEXEC);
    if (recv(CKPT_WIRE_SOCKET, &setup, sizeof setup, 0) != (ssize_t)sizeof setup ||
        curl_global_init(CURL_GLOBAL_DEFAULT) != CURLE_OK)
        return 1;
    site.anonymous = setup.anonymous;
    if (setup.version != CKPT_WIRE_VERSION) {
        (void)ckpt_fail(&err, CKPT_UNSUPPORTED, "ckptfs-http is of another version of ckptfs");
        return refuse_all(&err);
    }
    if (ckpt_site_find(&site, &err) < 0)
        return refuse_all(&err);
    for (unsigned n = 0, dead = 0; dead < MOST_WORKERS; n++) {
        const uint64_t begin = ckpt_now_ms();
        const struct ckpt_wire_answer again = {.id = CKPT_WIRE_AGAIN, .len = n};
        int status = 0;
        if ((n && send(CKPT_WIRE_SOCKET, &again, sizeof again, MSG_NOSIGNAL) < 0) ||
            socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
            return 1;
        const pid_t worker = fork();
        (void)close(pair[worker == 0 ? 0 : 1]);
        if (worker == 0)
            return work(&setup, n, &site, pair[1]);
        const int rc = worker < 0 ? 1 : keep(&site, pair[0]);
        (void)close(pair[0]);
        if (worker < 0 || waitpid(worker, &status, 0) != worker || !WIFSIGNALED(status))
            return rc;
        dead = ckpt_now_ms() - begin < SOON_MS ? dead + 1 : 0;
    }
    return 1;
}
