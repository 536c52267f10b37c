/* SPDX-License-Identifier: Apache-2.0 */
/* The keeper's part: finding region, endpoint and credentials where AWS's own tools find them. */
#include <ctype.h>
#include <curl/curl.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/json.h"
#include "base/mem.h"
#include "io/bucket/helper/helper.h"

enum {
    MOST_FILE = 1 << 20,
    PROCESS_MS = 60 * 1000, /* credential_process */
    HTTP_MS = 10 * 1000,
    METADATA_MS = 1000, /* IMDS: there may be none */
    MOST_HOPS = 4,      /* role_arn of a source_profile ... */
};

static const char *env(const char *name)
{
    const char *value = getenv(name);

    return value && *value ? value : NULL;
}

static bool env_is_true(const char *name)
{
    const char *value = env(name);

    return value && (strcasecmp(value, "true") == 0 || strcasecmp(value, "yes") == 0 ||
                     strcmp(value, "1") == 0);
}

/* Free a text that may hold a secret. */
static void wipep(char **text)
{
    if (*text)
        explicit_bzero(*text, strlen(*text));
    free(*text);
    *text = NULL;
}

/* ---- files ---- */

/* The text of a file, malloc'ed; NULL: it cannot be read. */
static char *read_text(const char *path)
{
    FILE *f = path ? fopen(path, "re") : NULL;
    char *text = f ? calloc(1, MOST_FILE + 1) : NULL;

    if (f)
        (void)setvbuf(f, NULL, _IONBF, 0); /* no copy of a secret */
    if (text && fread(text, 1, MOST_FILE, f) == 0 && ferror(f)) {
        free(text);
        text = NULL;
    }
    if (f)
        (void)fclose(f);
    return text;
}

/* A file of AWS's, where `variable` says, or in ~/.aws. */
static char *read_aws(const char *variable, const char *name)
{
    const char *home = env("HOME"), *say = env(variable);
    ckpt_cleanup(ckpt_freep) char *path = say    ? strdup(say)
                                          : home ? ckpt_asprintf("%s/.aws/%s", home, name)
                                                 : NULL;

    return read_text(path);
}

/* The two files, and a profile in them. */
struct profiles {
    char *config, *credentials;
};

static void profiles_release(struct profiles *p)
{
    wipep(&p->config);
    wipep(&p->credentials);
}

static struct profiles profiles_read(void)
{
    return (struct profiles){read_aws("AWS_CONFIG_FILE", "config"),
                             read_aws("AWS_SHARED_CREDENTIALS_FILE", "credentials")};
}

static const char *profile_name(void)
{
    const char *name = env("AWS_PROFILE");

    return name ? name : env("AWS_DEFAULT_PROFILE") ? env("AWS_DEFAULT_PROFILE") : "default";
}

/* A setting of a profile: the file of credentials goes first. */
static char *setting(const struct profiles *p, const char *name, const char *key, bool *ret_found)
{
    ckpt_cleanup(ckpt_freep) char *section = ckpt_asprintf("profile %s", name);
    char *value = p->credentials ? ckpt_ini_get(p->credentials, name, key, ret_found) : NULL;

    if (!value && p->config && section)
        value = ckpt_ini_get(p->config, section, key, ret_found);
    if (!value && p->config && strcmp(name, "default") == 0)
        value = ckpt_ini_get(p->config, name, key, ret_found);
    return value;
}

/* ---- where the store is ---- */

static int put(char *to, size_t cap, const char *what, const char *value, struct ckpt_err *err)
{
    if (strlen(value) >= cap)
        return ckpt_fail(err, CKPT_USAGE, "%s is longer than %zu bytes", what, cap - 1);
    memcpy(to, value, strlen(value) + 1);
    return 0;
}

/* The first of some variables, else a setting of the profile: into `to`, which is "" if there is
 * none. */
static int choose(const struct profiles *p, const char *const *variable, const char *key, char *to,
                  size_t cap, struct ckpt_err *err)
{
    for (; *variable; variable++)
        if (env(*variable))
            return put(to, cap, *variable, env(*variable), err);
    ckpt_cleanup(ckpt_freep) char *value = setting(p, profile_name(), key, NULL);
    return value ? put(to, cap, key, value, err) : 0;
}

int ckpt_site_find(struct ckpt_site *site, struct ckpt_err *err)
{
    static const char *const regions[] = {"AWS_REGION", "AWS_DEFAULT_REGION", NULL},
                             *const endpoints[] = {"AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", NULL},
                             *const bundles[] = {"AWS_CA_BUNDLE", NULL};
    ckpt_cleanup(profiles_release) struct profiles p = profiles_read();
    const bool deaf = env_is_true("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS");

    site->anonymous |= env_is_true("AWS_NO_SIGN_REQUEST");
    if (choose(&p, regions, "region", site->region, sizeof site->region, err) < 0 ||
        choose(&p, bundles, "ca_bundle", site->ca_bundle, sizeof site->ca_bundle, err) < 0 ||
        (!deaf &&
         choose(&p, endpoints, "endpoint_url", site->endpoint, sizeof site->endpoint, err) < 0))
        return -1;
    if (!*site->region)
        memcpy(site->region, "us-east-1", sizeof "us-east-1");
    if (strspn(site->region, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_") !=
        strlen(site->region))
        return ckpt_fail(err, CKPT_USAGE, "'%s' is no name of a region", site->region);
    for (size_t n = strlen(site->endpoint); n && site->endpoint[n - 1] == '/';)
        site->endpoint[--n] = '\0';
    if (*site->endpoint && strncmp(site->endpoint, "http://", 7) != 0 &&
        strncmp(site->endpoint, "https://", 8) != 0)
        return ckpt_fail(err, CKPT_USAGE,
                         "the endpoint '%s' (AWS_ENDPOINT_URL) is not http://... or https://...",
                         site->endpoint);
    if (strchr(site->endpoint, '@') || strchr(site->endpoint, '?'))
        return ckpt_fail(err, CKPT_USAGE,
                         "the endpoint of AWS_ENDPOINT_URL has a user, a password or a query");
    return 0;
}

/* ---- requests for credentials ---- */

static size_t collect(char *data, size_t size, size_t n, void *ctx)
{
    struct ckpt_str *s = ctx;

    if (s->len + size * n > MOST_FILE)
        return 0;
    ckpt_str_append(s, data, size * n);
    return size * n;
}

static void wipe_str(struct ckpt_str *s)
{
    if (s->ptr)
        explicit_bzero(s->ptr, s->cap);
    ckpt_str_release(s);
}

struct request {
    const char *url, *method, *body; /* body: NULL for none */
    const char *header[2];
    const struct ckpt_secret *sign; /* NULL: unsigned */
    const char *region;
    long timeout_ms;
    const char *ca_bundle;
    bool no_proxy;
};

/* Make a request: its status, or 0 and what is wrong in `why` (CURL_ERROR_SIZE bytes). */
static long request(const struct request *r, struct ckpt_str *answer, char *why)
{
    CURL *e = curl_easy_init();
    struct curl_slist *headers = NULL;
    char sigv4[128], token[sizeof r->sign->token + 64];
    long status = 0;

    why[0] = '\0';
    if (!e)
        return 0;
    for (size_t i = 0; i < 2; i++)
        if (r->header[i])
            headers = curl_slist_append(headers, r->header[i]);
    (void)curl_easy_setopt(e, CURLOPT_URL, r->url);
    (void)curl_easy_setopt(e, CURLOPT_ERRORBUFFER, why);
    (void)curl_easy_setopt(e, CURLOPT_PROTOCOLS_STR, "http,https");
    (void)curl_easy_setopt(e, CURLOPT_TIMEOUT_MS, r->timeout_ms);
    (void)curl_easy_setopt(e, CURLOPT_NOSIGNAL, 1L);
    (void)curl_easy_setopt(e, CURLOPT_WRITEFUNCTION, collect);
    (void)curl_easy_setopt(e, CURLOPT_WRITEDATA, answer);
    (void)curl_easy_setopt(e, CURLOPT_CUSTOMREQUEST, r->method);
    if (r->body)
        (void)curl_easy_setopt(e, CURLOPT_POSTFIELDS, r->body);
    if (*r->ca_bundle)
        (void)curl_easy_setopt(e, CURLOPT_CAINFO, r->ca_bundle);
    if (r->no_proxy)
        (void)curl_easy_setopt(e, CURLOPT_NOPROXY, "*");
    if (r->sign) {
        (void)snprintf(sigv4, sizeof sigv4, "aws:amz:%s:sts", r->region);
        (void)curl_easy_setopt(e, CURLOPT_AWS_SIGV4, sigv4);
        (void)curl_easy_setopt(e, CURLOPT_USERNAME, r->sign->key);
        (void)curl_easy_setopt(e, CURLOPT_PASSWORD, r->sign->secret);
        if (*r->sign->token) {
            (void)snprintf(token, sizeof token, "X-Amz-Security-Token: %s", r->sign->token);
            headers = curl_slist_append(headers, token);
        }
    }
    (void)curl_easy_setopt(e, CURLOPT_HTTPHEADER, headers);
    if (curl_easy_perform(e) == CURLE_OK)
        (void)curl_easy_getinfo(e, CURLINFO_RESPONSE_CODE, &status);
    curl_easy_cleanup(e);
    for (struct curl_slist *h = headers; h; h = h->next)
        explicit_bzero(h->data, strlen(h->data));
    curl_slist_free_all(headers);
    explicit_bzero(token, sizeof token);
    return status;
}

/* ---- credentials ---- */

static void secret_fail(struct ckpt_secret *s, enum ckpt_code code, const char *fmt, ...)
    CKPT_PRINTF(3, 4);
static void secret_fail(struct ckpt_secret *s, enum ckpt_code code, const char *fmt, ...)
{
    va_list ap;

    explicit_bzero(s->key, sizeof s->key);
    explicit_bzero(s->secret, sizeof s->secret);
    explicit_bzero(s->token, sizeof s->token);
    s->code = code;
    va_start(ap, fmt);
    (void)vsnprintf(s->text, sizeof s->text, fmt, ap);
    va_end(ap);
}

/* Could the text stand in a header? */
static bool is_plain(const char *text)
{
    for (; *text; text++)
        if ((unsigned char)*text <= ' ' || (unsigned char)*text >= 127)
            return false;
    return true;
}

static void secret_set(struct ckpt_secret *s, const char *kind, const char *key, const char *secret,
                       const char *token, const char *expires)
{
    (void)snprintf(s->kind, sizeof s->kind, "%s", kind);
    if (!key || !*key || !secret || !*secret) {
        secret_fail(s, CKPT_USAGE, "credentials of %s: the %s is missing", kind,
                    key && *key ? "secret access key" : "access key id");
        return;
    }
    if (strlen(key) >= sizeof s->key || strlen(secret) >= sizeof s->secret ||
        strlen(token ? token : "") >= sizeof s->token || !is_plain(key) || !is_plain(secret) ||
        !is_plain(token ? token : "")) {
        secret_fail(s, CKPT_USAGE,
                    "credentials of %s: too long, or with characters that no key has", kind);
        return;
    }
    (void)snprintf(s->key, sizeof s->key, "%s", key);
    (void)snprintf(s->secret, sizeof s->secret, "%s", secret);
    (void)snprintf(s->token, sizeof s->token, "%s", token ? token : "");
    s->expires = expires && *expires ? ckpt_time_parse(expires) : 0;
    s->code = CKPT_OK;
    if (s->expires < 0)
        secret_fail(s, CKPT_FORMAT, "credentials of %s: '%s' is no time", kind, expires);
    else if (s->expires && s->expires <= time(NULL))
        secret_fail(s, CKPT_USAGE, "credentials of %s expired at %s", kind, expires);
}

/* Credentials in JSON, as processes, ECS and IMDS give them; `token` is the token's key there. */
static void secret_json(struct ckpt_secret *s, const char *kind, const char *text,
                        const char *token)
{
    json_error_t why;
    ckpt_cleanup(ckpt_json_decrefp) json_t *j = json_loads(text, 0, &why);
    const char *expires = ckpt_json_str(j, "Expiration");

    if (!json_is_object(j))
        secret_fail(s, CKPT_FORMAT, "credentials of %s: the answer is not a JSON object", kind);
    else
        secret_set(s, kind, ckpt_json_str(j, "AccessKeyId"), ckpt_json_str(j, "SecretAccessKey"),
                   ckpt_json_str(j, token), expires);
}

static void secret_xml(struct ckpt_secret *s, const char *kind, const struct ckpt_str *xml)
{
    static const char *const names[] = {"AccessKeyId", "SecretAccessKey", "SessionToken",
                                        "Expiration"};
    char text[4][sizeof s->token];

    for (size_t i = 0; i < 4; i++)
        ckpt_xml_text(ckpt_str_get(xml), xml->len, names[i], text[i], sizeof text[i]);
    secret_set(s, kind, text[0], text[1], text[2], text[3]);
    explicit_bzero(text, sizeof text);
}

/* Ask STS. `by` signs; NULL: the question has a token. */
static void ask_sts(const struct ckpt_site *site, const struct ckpt_secret *by, const char *query,
                    const char *kind, struct ckpt_secret *s)
{
    const char *say =
        env("AWS_ENDPOINT_URL_STS") ? env("AWS_ENDPOINT_URL_STS") : env("AWS_ENDPOINT_URL");
    const bool china = strncmp(site->region, "cn-", 3) == 0;
    ckpt_cleanup(ckpt_freep) char *url =
        say ? ckpt_asprintf("%s/", say)
            : ckpt_asprintf("https://sts.%s.amazonaws.com%s/", site->region, china ? ".cn" : "");
    ckpt_cleanup(wipe_str) struct ckpt_str answer = {0};
    char why[CURL_ERROR_SIZE], code[128], words[512];

    if (!url)
        return;
    const struct request r = {.url = url,
                              .method = "POST",
                              .body = query,
                              .header = {"Content-Type: application/x-www-form-urlencoded"},
                              .sign = by,
                              .region = site->region,
                              .timeout_ms = HTTP_MS,
                              .ca_bundle = site->ca_bundle};
    const long status = request(&r, &answer, why);
    if (status == 200) {
        secret_xml(s, kind, &answer);
        return;
    }
    ckpt_xml_text(ckpt_str_get(&answer), answer.len, "Code", code, sizeof code);
    ckpt_xml_text(ckpt_str_get(&answer), answer.len, "Message", words, sizeof words);
    secret_fail(s, status ? CKPT_USAGE : CKPT_IO, "%s: %s answers %ld %s %s%s", kind, url, status,
                code, words, why);
}

/* What a role is asked for with. */
static void put_field(struct ckpt_str *q, const char *name, const char *value)
{
    ckpt_str_printf(q, "%s%s=", q->len ? "&" : "", name);
    ckpt_url_encode(q, value, false);
}

static void assume(const struct ckpt_site *site, const struct ckpt_secret *by, const char *role,
                   const char *session, const char *external, const char *token, const char *kind,
                   struct ckpt_secret *s)
{
    ckpt_cleanup(wipe_str) struct ckpt_str q = {0};

    put_field(&q, "Action", token ? "AssumeRoleWithWebIdentity" : "AssumeRole");
    put_field(&q, "Version", "2011-06-15");
    put_field(&q, "RoleArn", role);
    put_field(&q, "RoleSessionName", session && *session ? session : "ckptfs");
    if (external)
        put_field(&q, "ExternalId", external);
    if (token)
        put_field(&q, "WebIdentityToken", token);
    if (!q.failed)
        ask_sts(site, by, q.ptr, kind, s);
}

static void web_identity(const struct ckpt_site *site, const char *file, const char *role,
                         const char *session, struct ckpt_secret *s)
{
    ckpt_cleanup(wipep) char *token = read_text(file);
    char kind[128];

    (void)snprintf(kind, sizeof kind, "web identity (%.90s)", role);
    if (!token) {
        secret_fail(s, CKPT_USAGE, "%s: the token '%s' can't be read", kind, file);
        return;
    }
    token[strcspn(token, " \t\r\n")] = '\0';
    assume(site, NULL, role, session, NULL, token, kind, s);
}

/* credential_process: a shell command that prints JSON. */
static void run_process(const char *command, const char *kind, struct ckpt_secret *s)
{
    int out[2], status = 0;
    pid_t pid;
    const uint64_t until = ckpt_now_ms() + PROCESS_MS;
    ckpt_cleanup(wipep) char *text = calloc(1, MOST_FILE + 1);
    size_t len = 0;

    if (!text || pipe2(out, O_CLOEXEC) < 0)
        return;
    if ((pid = fork()) == 0) {
        (void)dup2(out[1], 1);
        (void)setpgid(0, 0);
        (void)execl("/bin/sh", "sh", "-c", command, (char *)NULL);
        _exit(127);
    }
    (void)close(out[1]);
    for (bool more = pid > 0; more;) {
        struct pollfd p = {out[0], POLLIN, 0};
        const uint64_t now = ckpt_now_ms();
        const ssize_t n = now < until && poll(&p, 1, (int)(until - now)) > 0
                              ? read(out[0], text + len, MOST_FILE - len)
                              : 0;
        more = n > 0;
        len += n > 0 ? (size_t)n : 0;
    }
    (void)close(out[0]);
    if (ckpt_now_ms() >= until)
        (void)kill(-pid, SIGKILL);
    while (pid > 0 && waitpid(pid, &status, 0) < 0 && errno == EINTR)
        continue;
    if (pid < 0 || !WIFEXITED(status) || WEXITSTATUS(status) != 0)
        secret_fail(s, CKPT_USAGE, "%s: the command failed, or took more than %d s", kind,
                    PROCESS_MS / 1000);
    else
        secret_json(s, kind, text, "SessionToken");
}

/* ---- metadata services ---- */

/* A container's credentials may come from these hosts without TLS. */
static bool is_local(const char *url)
{
    static const char *const hosts[] = {"http://127.0.0.1",      "http://localhost",
                                        "http://[::1]",          "http://169.254.170.2",
                                        "http://169.254.170.23", "http://[fd00:ec2::23]"};

    for (size_t i = 0; i < sizeof hosts / sizeof *hosts; i++) {
        const size_t n = strlen(hosts[i]);
        if (strncmp(url, hosts[i], n) == 0 && strchr(":/", url[n]))
            return true;
    }
    return strncmp(url, "https://", 8) == 0;
}

static bool container(const struct ckpt_site *site, struct ckpt_secret *s)
{
    const char *relative = env("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI");
    const char *full = env("AWS_CONTAINER_CREDENTIALS_FULL_URI");
    const char *token_file = env("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE");
    ckpt_cleanup(ckpt_freep) char *url = relative
                                             ? ckpt_asprintf("http://169.254.170.2%s", relative)
                                         : full ? strdup(full)
                                                : NULL;
    ckpt_cleanup(wipep) char *token = token_file ? read_text(token_file) : NULL;
    ckpt_cleanup(wipep) char *header = NULL;
    ckpt_cleanup(wipe_str) struct ckpt_str answer = {0};
    char why[CURL_ERROR_SIZE];

    if (!url)
        return false;
    if (!is_local(url)) {
        secret_fail(s, CKPT_USAGE,
                    "AWS_CONTAINER_CREDENTIALS_FULL_URI='%s' is neither https nor a "
                    "local address",
                    url);
        return true;
    }
    if (token)
        token[strcspn(token, "\r\n")] = '\0';
    const char *say = token ? token : env("AWS_CONTAINER_AUTHORIZATION_TOKEN");
    header = say ? ckpt_asprintf("Authorization: %s", say) : NULL;
    const struct request r = {.url = url,
                              .method = "GET",
                              .header = {header},
                              .timeout_ms = HTTP_MS,
                              .ca_bundle = site->ca_bundle,
                              .no_proxy = true};
    const long status = request(&r, &answer, why);
    if (status == 200)
        secret_json(s, "container", ckpt_str_get(&answer), "Token");
    else
        secret_fail(s, CKPT_IO, "credentials of the container: %s answers %ld %s", url, status,
                    why);
    return true;
}

static bool imds_get(const char *base, const char *path, const char *method, const char *header,
                     struct ckpt_str *answer)
{
    ckpt_cleanup(ckpt_freep) char *url = ckpt_asprintf("%s%s", base, path);
    char why[CURL_ERROR_SIZE];
    const struct request r = {.url = url,
                              .method = method,
                              .header = {header},
                              .timeout_ms = METADATA_MS,
                              .ca_bundle = "",
                              .no_proxy = true};

    ckpt_str_clear(answer);
    return url && request(&r, answer, why) == 200 && answer->len && !answer->failed;
}

/* The role of the machine. False: there is none. */
static bool imds(struct ckpt_secret *s)
{
    const char *say = env("AWS_EC2_METADATA_SERVICE_ENDPOINT");
    ckpt_cleanup(ckpt_freep) char *base = strdup(say ? say : "http://169.254.169.254");
    ckpt_cleanup(wipep) char *header = NULL;
    ckpt_cleanup(wipe_str) struct ckpt_str answer = {0};
    ckpt_cleanup(ckpt_freep) char *path = NULL;
#define ROLES "/latest/meta-data/iam/security-credentials/"

    if (env_is_true("AWS_EC2_METADATA_DISABLED") || !base)
        return false;
    for (size_t n = strlen(base); n && base[n - 1] == '/';)
        base[--n] = '\0';
    if (!imds_get(base, "/latest/api/token", "PUT", "X-aws-ec2-metadata-token-ttl-seconds: 21600",
                  &answer))
        return false;
    answer.ptr[strcspn(answer.ptr, "\r\n")] = '\0';
    header = ckpt_asprintf("X-aws-ec2-metadata-token: %s", answer.ptr);
    if (!header || !imds_get(base, ROLES, "GET", header, &answer))
        return false;
    answer.ptr[strcspn(answer.ptr, "\r\n")] = '\0';
    path = ckpt_asprintf(ROLES "%s", answer.ptr);
    if (!path || !imds_get(base, path, "GET", header, &answer))
        return false;
    secret_json(s, "instance (IMDSv2)", answer.ptr, "Token");
    return true;
}

/* ---- profiles ---- */

static bool from_profile(const struct ckpt_site *site, const struct profiles *p, const char *name,
                         unsigned hops, struct ckpt_secret *s);

/* Credentials that credential_source names. */
static void from_source(const struct ckpt_site *site, const char *source, struct ckpt_secret *s)
{
    bool any = false;

    if (strcmp(source, "Environment") == 0) {
        secret_set(s, "environment", env("AWS_ACCESS_KEY_ID"), env("AWS_SECRET_ACCESS_KEY"),
                   env("AWS_SESSION_TOKEN"), NULL);
        return;
    }
    if (strcmp(source, "EcsContainer") == 0)
        any = container(site, s);
    else if (strcmp(source, "Ec2InstanceMetadata") == 0)
        any = imds(s);
    if (!any)
        secret_fail(s, CKPT_USAGE, "credential_source = %s gives no credentials", source);
}

static void from_role(const struct ckpt_site *site, const struct profiles *p, const char *name,
                      const char *role, unsigned hops, struct ckpt_secret *s)
{
    ckpt_cleanup(ckpt_freep) char *source = setting(p, name, "source_profile", NULL);
    ckpt_cleanup(ckpt_freep) char *place = setting(p, name, "credential_source", NULL);
    ckpt_cleanup(ckpt_freep) char *file = setting(p, name, "web_identity_token_file", NULL);
    ckpt_cleanup(ckpt_freep) char *session = setting(p, name, "role_session_name", NULL);
    ckpt_cleanup(ckpt_freep) char *external = setting(p, name, "external_id", NULL);
    ckpt_cleanup(ckpt_freep) char *mfa = setting(p, name, "mfa_serial", NULL);
    ckpt_cleanup(ckpt_freep) struct ckpt_secret *by = calloc(1, sizeof *by);
    char kind[128];

    (void)snprintf(kind, sizeof kind, "role %.60s of profile '%.40s'", role, name);
    if (!by)
        return;
    if (mfa) {
        secret_fail(s, CKPT_UNSUPPORTED, "%s: mfa_serial needs a person; use credential_process",
                    kind);
        return;
    }
    if (file) {
        web_identity(site, file, role, session, s);
        return;
    }
    by->code = CKPT_USAGE;
    if (source && hops >= MOST_HOPS)
        secret_fail(by, CKPT_USAGE, "source_profile leads in a circle");
    else if (source &&
             !from_profile(site, p, source, strcmp(source, name) == 0 ? MOST_HOPS : hops + 1, by))
        secret_fail(by, CKPT_USAGE, "profile '%s' has no credentials", source);
    else if (place)
        from_source(site, place, by);
    else if (!source)
        secret_fail(by, CKPT_USAGE, "it has neither source_profile nor credential_source");
    if (by->code)
        secret_fail(s, by->code, "%s: %.700s", kind, by->text);
    else
        assume(site, by, role, session, external, NULL, kind, s);
    explicit_bzero(by, sizeof *by);
}

/* False: the profile says nothing about credentials. */
static bool from_profile(const struct ckpt_site *site, const struct profiles *p, const char *name,
                         unsigned hops, struct ckpt_secret *s)
{
    ckpt_cleanup(wipep) char *key = setting(p, name, "aws_access_key_id", NULL);
    ckpt_cleanup(wipep) char *secret = setting(p, name, "aws_secret_access_key", NULL);
    ckpt_cleanup(wipep) char *token = setting(p, name, "aws_session_token", NULL);
    ckpt_cleanup(ckpt_freep) char *role = setting(p, name, "role_arn", NULL);
    ckpt_cleanup(ckpt_freep) char *process = setting(p, name, "credential_process", NULL);
    ckpt_cleanup(ckpt_freep) char *sso = setting(p, name, "sso_session", NULL);
    ckpt_cleanup(ckpt_freep) char *sso_url = setting(p, name, "sso_start_url", NULL);
    char kind[128];

    (void)snprintf(kind, sizeof kind, "profile '%.90s'", name);
    if (role && !(hops == MOST_HOPS && key)) /* a profile may be its own source */
        from_role(site, p, name, role, hops, s);
    else if (key || secret)
        secret_set(s, kind, key, secret, token, NULL);
    else if (process)
        run_process(process, kind, s);
    else if (sso || sso_url)
        secret_fail(s, CKPT_UNSUPPORTED,
                    "%s uses SSO, which ckptfs does not: in the profile, write credential_process "
                    "= aws configure export-credentials --profile %s",
                    kind, name);
    else
        return false;
    return true;
}

void ckpt_secret_find(const struct ckpt_site *site, struct ckpt_secret *s)
{
    ckpt_cleanup(profiles_release) struct profiles p = profiles_read();
    const char *asked = env("AWS_PROFILE"), *token = env("AWS_WEB_IDENTITY_TOKEN_FILE");
    bool found = false;

    s->code = CKPT_NOMEM;
    if (env("AWS_ACCESS_KEY_ID") || env("AWS_SECRET_ACCESS_KEY")) {
        secret_set(s, "environment", env("AWS_ACCESS_KEY_ID"), env("AWS_SECRET_ACCESS_KEY"),
                   env("AWS_SESSION_TOKEN"), env("AWS_CREDENTIAL_EXPIRATION"));
        return;
    }
    free(setting(&p, profile_name(), "region", &found));
    if (asked && !found) {
        secret_fail(s, CKPT_USAGE,
                    "AWS_PROFILE=%s: there is no such profile in ~/.aws/config and "
                    "~/.aws/credentials",
                    asked);
        return;
    }
    if (from_profile(site, &p, profile_name(), 0, s))
        return;
    if (token && env("AWS_ROLE_ARN"))
        web_identity(site, token, env("AWS_ROLE_ARN"), env("AWS_ROLE_SESSION_NAME"), s);
    else if (!container(site, s) && !imds(s))
        secret_fail(s, CKPT_USAGE,
                    "there are no credentials: not in the environment (AWS_ACCESS_KEY_ID), profile "
                    "'%s' of ~/.aws, AWS_WEB_IDENTITY_TOKEN_FILE, a container, or the instance "
                    "(IMDS). For a public bucket: -o anonymous",
                    profile_name());
}
