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

#include "base/confine.h"
#include "base/mem.h"
#include "io/bucket/helper/helper.h"

enum { MOST_CA = 8 << 20, MOST_PORTS = 16 };

/* No core file, and nobody of the same user may trace it or read its memory. */
static void hide(void)
{
    const struct rlimit none = {0, 0};

    (void)setrlimit(RLIMIT_CORE, &none);
    (void)prctl(PR_SET_DUMPABLE, 0);
}

/* ---- what the worker needs from files ---- */

static int read_ca(const struct ckpt_site *site, struct ckpt_worker_ca *ret, struct ckpt_err *err)
{
    const char *say = *site->ca_bundle ? site->ca_bundle : getenv("SSL_CERT_FILE");
    const char *const usual[] = {say, "/etc/ssl/certs/ca-certificates.crt",
                                 "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem",
                                 "/etc/ssl/cert.pem"};
    ckpt_cleanup(ckpt_closep) int fd = -1;
    struct stat st;
    ssize_t n;

    for (size_t i = 0; i < sizeof usual / sizeof *usual && fd < 0 && !(say && i); i++)
        fd = usual[i] ? open(usual[i], O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0 && say)
        return ckpt_fail_errno(err, errno, "the certificates '%s' (AWS_CA_BUNDLE, SSL_CERT_FILE)",
                               say);
    if (fd < 0 || fstat(fd, &st) < 0 || st.st_size <= 0 || st.st_size > MOST_CA)
        return say ? ckpt_fail(err, CKPT_USAGE, "'%s' is no bundle of certificates", say) : 0;
    if (!(ret->text = malloc((size_t)st.st_size)))
        return ckpt_nomem(err);
    while (ret->len < (size_t)st.st_size &&
           (n = read(fd, ret->text + ret->len, (size_t)st.st_size - ret->len)) > 0)
        ret->len += (size_t)n;
    return 0;
}

/* The port of a URL; 0: none can be told. */
static unsigned port_of(const char *url)
{
    CURLU *u = curl_url();
    char *port = NULL;
    unsigned n = 0;

    if (u &&
        curl_url_set(u, CURLUPART_URL, url, CURLU_GUESS_SCHEME | CURLU_NON_SUPPORT_SCHEME) ==
            CURLUE_OK &&
        curl_url_get(u, CURLUPART_PORT, &port, CURLU_DEFAULT_PORT) == CURLUE_OK)
        n = (unsigned)strtoul(port, NULL, 10);
    curl_free(port);
    curl_url_cleanup(u);
    return n;
}

static int allow_ports(int rules, const struct ckpt_site *site)
{
    static const char *const proxies[] = {"http_proxy", "https_proxy", "HTTPS_PROXY", "all_proxy",
                                          "ALL_PROXY"};
    unsigned port[MOST_PORTS] = {53, *site->endpoint ? port_of(site->endpoint) : 443}, n = 2;

    for (size_t i = 0; i < sizeof proxies / sizeof *proxies; i++) {
        const char *say = getenv(proxies[i]);
        if (say && *say) {
            const bool has_scheme = strstr(say, "://") != NULL;
            unsigned p = port_of(say);
            if (!has_scheme && p == 80 && !strstr(say, ":80"))
                p = 1080; /* curl's default for proxies */
            port[n++] = p;
            port[n++] = has_scheme ? p : 1080;
        }
    }
    for (unsigned i = 0; i < n; i++)
        if (port[i] && ckpt_landlock_port(rules, port[i]) < 0)
            return -1;
    return 0;
}

/* Names are looked up by the C library, which reads these, and loads modules. */
static int allow_names(int rules)
{
    static const char *const paths[] = {
        "/etc/hosts",    "/etc/resolv.conf", "/etc/nsswitch.conf", "/etc/host.conf",
        "/etc/gai.conf", "/etc/localtime",   "/etc/ld.so.cache",   "/lib",
        "/lib64",        "/usr/lib",         "/usr/lib64"};

    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++)
        if (ckpt_landlock_allow(rules, paths[i]) < 0)
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

/* Answer every question with the same error. */
static int refuse_all(const struct ckpt_err *err)
{
    union {
        struct ckpt_wire_ask q;
        char bytes[CKPT_WIRE_MOST];
    } m;
    struct {
        struct ckpt_wire_answer a;
        char text[CKPT_ERR_TEXT];
    } to = {0};

    to.a.code = err->code;
    memcpy(to.text, err->text, sizeof to.text);
    while (recv(CKPT_WIRE_SOCKET, m.bytes, sizeof m.bytes, 0) > 0) {
        to.a.id = m.q.id;
        if (send(CKPT_WIRE_SOCKET, &to, sizeof to.a + strlen(to.text) + 1, MSG_NOSIGNAL) < 0)
            break;
    }
    return 1;
}

static int work(const struct ckpt_wire_setup *setup, const struct ckpt_site *site, int keeper)
{
    struct ckpt_worker_ca ca = {0};
    struct ckpt_err err = {0};
    void *memory =
        mmap(NULL, setup->memory, PROT_READ | PROT_WRITE, MAP_SHARED, CKPT_WIRE_MEMORY, 0);

    (void)close(CKPT_WIRE_MEMORY);
    if (memory == MAP_FAILED)
        (void)ckpt_fail_errno(&err, errno, "mapping the memory of blocks");
    else if (read_ca(site, &ca, &err) == 0 && confine(site, &err) == 0) {
        const int rc = ckpt_worker_run(setup, site, ca, keeper, memory);
        free(ca.text);
        return rc;
    }
    free(ca.text);
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
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
        return 1;
    const pid_t worker = fork();
    (void)close(pair[worker == 0 ? 0 : 1]);
    if (worker == 0)
        return work(&setup, &site, pair[1]);
    (void)close(CKPT_WIRE_SOCKET);
    (void)close(CKPT_WIRE_MEMORY);
    const int rc = worker < 0 ? 1 : keep(&site, pair[0]);
    (void)waitpid(worker, NULL, 0);
    return rc;
}
