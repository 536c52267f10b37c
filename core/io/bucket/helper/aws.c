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
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/json.h"
#include "base/mem.h"
#include "io/bucket/helper/helper.h"

enum {
    MOST_FILE = 8 << 20,
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

char *ckpt_read_text(const char *path)
{
    FILE *f = path ? fopen(path, "re") : NULL;
    char *text = f ? calloc(1, MOST_FILE + 1) : NULL;

    if (f)
        (void)setvbuf(f, NULL, _IONBF, 0); /* no copy of a secret */
    if (text && (fread(text, 1, MOST_FILE, f) == MOST_FILE || ferror(f))) {
        errno = ferror(f) ? errno : EFBIG;
        wipep(&text);
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

    return ckpt_read_text(path);
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

/* One of two variables, else a setting of the profile: into `to`, which is "" if there is none. */
static int choose(const struct profiles *p, const char *first, const char *second, const char *key,
                  char *to, size_t cap, struct ckpt_err *err)
{
    const char *name = env(first) ? first : second;
    ckpt_cleanup(ckpt_freep) char *own =
        env(name) ? strdup(env(name)) : setting(p, profile_name(), key, NULL);

    if (env(name) && !own)
        return ckpt_nomem(err);
    if (own && strlen(own) >= cap)
        return ckpt_fail(err, CKPT_USAGE, "%s (%s) is longer than %zu bytes", name, key, cap - 1);
    (void)snprintf(to, cap, "%s", own ? own : "");
    return 0;
}

int ckpt_site_find(struct ckpt_site *site, struct ckpt_err *err)
{
    ckpt_cleanup(profiles_release) struct profiles p = profiles_read();
    const bool deaf = env_is_true("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS");
    ckpt_cleanup(ckpt_freep) char *services = setting(&p, profile_name(), "services", NULL);

    site->anonymous |= env_is_true("AWS_NO_SIGN_REQUEST");
    if (choose(&p, "AWS_REGION", "AWS_DEFAULT_REGION", "region", site->region, sizeof site->region,
               err) < 0 ||
        choose(&p, "AWS_CA_BUNDLE", "AWS_CA_BUNDLE", "ca_bundle", site->ca_bundle,
               sizeof site->ca_bundle, err) < 0 ||
        (!deaf && choose(&p, "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "endpoint_url",
                         site->endpoint, sizeof site->endpoint, err) < 0))
        return -1;
    if (services && !deaf && !*site->endpoint)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "profile '%s' says services = %s, which ckptfs does not read: write "
                         "endpoint_url in the profile, or set AWS_ENDPOINT_URL_S3",
                         profile_name(), services);
    if (!*site->region)
        memcpy(site->region, "us-east-1", sizeof "us-east-1");
    if (strspn(site->region, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_") !=
        strlen(site->region))
        return ckpt_fail(err, CKPT_USAGE, "'%s' is no name of a region", site->region);
    for (size_t n = strlen(site->endpoint); n && site->endpoint[n - 1] == '/';)
        site->endpoint[--n] = '\0';
    if (*site->endpoint && !ckpt_has_prefix(site->endpoint, "http://") &&
        !ckpt_has_prefix(site->endpoint, "https://"))
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

void ckpt_header_add(struct curl_slist **list, const char *name, const char *value)
{
    ckpt_cleanup(wipep) char *line = ckpt_asprintf("%s: %s", name, value);
    struct curl_slist *more = line ? curl_slist_append(*list, line) : NULL;

    *list = more ? more : *list;
}

void ckpt_headers_free(struct curl_slist **list)
{
    for (struct curl_slist *h = *list; h; h = h->next)
        explicit_bzero(h->data, strlen(h->data));
    curl_slist_free_all(*list);
    *list = NULL;
}

void ckpt_sign(void *curl, struct curl_slist **headers, const struct ckpt_secret *by,
               const char *region, const char *service)
{
    char sigv4[128];

    (void)snprintf(sigv4, sizeof sigv4, "aws:amz:%s:%s", region, service);
    (void)curl_easy_setopt(curl, CURLOPT_AWS_SIGV4, sigv4);
    (void)curl_easy_setopt(curl, CURLOPT_USERNAME, by->key);
    (void)curl_easy_setopt(curl, CURLOPT_PASSWORD, by->secret);
    if (*by->token)
        ckpt_header_add(headers, "X-Amz-Security-Token", by->token);
}

struct request {
    const char *url, *method, *body; /* NULL: GET or POST; a GET */
    const char *name, *value;        /* a header; no value: none */
    const struct ckpt_secret *by;    /* who signs; NULL: nobody */
    long timeout_ms;
};

/* Make a request: its status, or 0 and what is wrong in `why` (CURL_ERROR_SIZE bytes). */
static long request(const struct ckpt_site *site, const struct request *r, struct ckpt_str *answer,
                    char *why)
{
    ckpt_cleanup(ckpt_headers_free) struct curl_slist *headers = NULL;
    CURL *e = r->url ? curl_easy_init() : NULL;
    long status = 0;

    why[0] = '\0';
    if (!e)
        return 0;
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
    else /* a service of this machine */
        (void)curl_easy_setopt(e, CURLOPT_NOPROXY, "*");
    if (*site->ca_bundle)
        (void)curl_easy_setopt(e, CURLOPT_CAINFO, site->ca_bundle);
    if (r->value)
        ckpt_header_add(&headers, r->name, r->value);
    if (r->by)
        ckpt_sign(e, &headers, r->by, site->region, "sts");
    (void)curl_easy_setopt(e, CURLOPT_HTTPHEADER, headers);
    if (curl_easy_perform(e) == CURLE_OK)
        (void)curl_easy_getinfo(e, CURLINFO_RESPONSE_CODE, &status);
    curl_easy_cleanup(e);
    return answer->failed ? 0 : status;
}

/* ---- credentials ---- */

/* Say why there are none, in *s, which is zeroed. */
static void secret_fail(struct ckpt_secret *s, enum ckpt_code code, const char *fmt, ...)
    CKPT_PRINTF(3, 4);
static void secret_fail(struct ckpt_secret *s, enum ckpt_code code, const char *fmt, ...)
{
    va_list ap;

    s->code = code;
    va_start(ap, fmt);
    (void)vsnprintf(s->text, sizeof s->text, fmt, ap);
    va_end(ap);
}

/* Copy a text that could stand in a header. */
static bool put_plain(char *to, size_t cap, const char *text)
{
    size_t n = 0;

    for (; text && text[n]; n++)
        if (n + 1 >= cap || (unsigned char)text[n] <= ' ' || (unsigned char)text[n] >= 127)
            return false;
    memcpy(to, text ? text : "", n + 1);
    return true;
}

static void secret_set(struct ckpt_secret *s, const char *kind, const char *key, const char *secret,
                       const char *token, const char *expires)
{
    const int64_t end = expires && *expires ? ckpt_time_parse(expires) : 0;

    (void)snprintf(s->kind, sizeof s->kind, "%s", kind);
    s->expires = end;
    s->code = CKPT_OK;
    if (!key || !*key || !secret || !*secret)
        secret_fail(s, CKPT_USAGE, "credentials of %s: the %s is missing", kind,
                    key && *key ? "secret access key" : "access key id");
    else if (end < 0)
        secret_fail(s, CKPT_FORMAT, "credentials of %s: '%s' is no time", kind, expires);
    else if (end && end <= time(NULL))
        secret_fail(s, CKPT_USAGE, "credentials of %s expired at %s", kind, expires);
    else if (!put_plain(s->key, sizeof s->key, key) ||
             !put_plain(s->secret, sizeof s->secret, secret) ||
             !put_plain(s->token, sizeof s->token, token))
        secret_fail(s, CKPT_USAGE,
                    "credentials of %s: too long, or with characters that no key has", kind);
}

/* Credentials in JSON, as processes, ECS and IMDS give them; `token` is the token's key there. */
static void secret_json(struct ckpt_secret *s, const char *kind, const char *text,
                        const char *token)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *j = json_loads(text, 0, NULL);

    if (!json_is_object(j))
        secret_fail(s, CKPT_FORMAT, "credentials of %s: the answer is not a JSON object", kind);
    else
        secret_set(s, kind, ckpt_json_str(j, "AccessKeyId"), ckpt_json_str(j, "SecretAccessKey"),
                   ckpt_json_str(j, token), ckpt_json_str(j, "Expiration"));
}

/* Reads an answer of STS: credentials, or an error. */
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

/* Ask STS for a role, as `by`; NULL: as who has the token. */
static void assume(const struct ckpt_site *site, const struct ckpt_secret *by, const char *role,
                   const char *session, const char *external, const char *token, const char *kind,
                   struct ckpt_secret *s)
{
    const char *const field[][2] = {{"Action", token ? "AssumeRoleWithWebIdentity" : "AssumeRole"},
                                    {"Version", "2011-06-15"},
                                    {"RoleArn", role},
                                    {"RoleSessionName", session && *session ? session : "ckptfs"},
                                    {"ExternalId", external},
                                    {"WebIdentityToken", token}};
    const char *say =
        env("AWS_ENDPOINT_URL_STS") ? env("AWS_ENDPOINT_URL_STS") : env("AWS_ENDPOINT_URL");
    ckpt_cleanup(ckpt_freep) char *url =
        say ? ckpt_asprintf("%s/", say)
            : ckpt_asprintf("https://sts.%s.amazonaws.com%s/", site->region,
                            ckpt_has_prefix(site->region, "cn-") ? ".cn" : "");
    ckpt_cleanup(wipe_str) struct ckpt_str query = {0}, answer = {0};
    char why[CURL_ERROR_SIZE], code[128], words[512];

    for (size_t i = 0; i < sizeof field / sizeof *field; i++)
        if (field[i][1]) {
            ckpt_str_printf(&query, "%s%s=", i ? "&" : "", field[i][0]);
            ckpt_url_encode(&query, field[i][1], false);
        }
    const struct request r = {
        .url = url, .body = ckpt_str_get(&query), .by = by, .timeout_ms = HTTP_MS};
    const long status = query.failed ? 0 : request(site, &r, &answer, why);
    if (status == 200) {
        secret_xml(s, kind, &answer);
        return;
    }
    ckpt_xml_text(ckpt_str_get(&answer), answer.len, "Code", code, sizeof code);
    ckpt_xml_text(ckpt_str_get(&answer), answer.len, "Message", words, sizeof words);
    secret_fail(s, status ? CKPT_USAGE : CKPT_IO, "%s: %s answers %ld %s %s%s", kind, r.url, status,
                code, words, why);
}

/* ---- where they are ---- */

static bool environment(const struct ckpt_site *site, struct ckpt_secret *s)
{
    (void)site;
    if (!env("AWS_ACCESS_KEY_ID") && !env("AWS_SECRET_ACCESS_KEY"))
        return false;
    secret_set(s, "environment", env("AWS_ACCESS_KEY_ID"), env("AWS_SECRET_ACCESS_KEY"),
               env("AWS_SESSION_TOKEN"), env("AWS_CREDENTIAL_EXPIRATION"));
    return true;
}

static void web_identity(const struct ckpt_site *site, const char *file, const char *role,
                         const char *session, struct ckpt_secret *s)
{
    ckpt_cleanup(wipep) char *token = ckpt_read_text(file);
    char kind[128];

    (void)snprintf(kind, sizeof kind, "web identity (%.90s)", role);
    if (!token) {
        secret_fail(s, CKPT_USAGE, "%s: the token '%s' can't be read", kind, file);
        return;
    }
    token[strcspn(token, " \t\r\n")] = '\0';
    assume(site, NULL, role, session, NULL, token, kind, s);
}

/* credential_process: a shell command that prints JSON. What it says on stderr is told if it fails.
 */
static void run_process(const char *command, const char *kind, struct ckpt_secret *s)
{
    const uint64_t until = ckpt_now_ms() + PROCESS_MS;
    ckpt_cleanup(wipep) char *text = calloc(1, MOST_FILE + 1);
    ckpt_cleanup(ckpt_closep) int said = memfd_create("stderr", MFD_CLOEXEC);
    char words[400] = "";
    int out[2], status = 0;
    size_t len = 0;
    pid_t pid;

    if (!text || pipe2(out, O_CLOEXEC) < 0)
        return;
    if ((pid = fork()) == 0) {
        (void)dup2(out[1], 1);
        (void)dup2(said, 2);
        (void)setpgid(0, 0);
        (void)execl("/bin/sh", "sh", "-c", command, (char *)NULL);
        _exit(127);
    }
    (void)close(out[1]);
    for (ssize_t n = pid; n > 0; len += n > 0 ? (size_t)n : 0) {
        struct pollfd p = {out[0], POLLIN, 0};
        const uint64_t now = ckpt_now_ms();
        n = now < until && poll(&p, 1, (int)(until - now)) > 0
                ? read(out[0], text + len, MOST_FILE - len)
                : 0;
    }
    (void)close(out[0]);
    const bool late = ckpt_now_ms() >= until;
    if (pid > 0 && late)
        (void)kill(-pid, SIGKILL);
    while (pid > 0 && waitpid(pid, &status, 0) < 0 && errno == EINTR)
        continue;
    const ssize_t n = said < 0 ? 0 : pread(said, words, sizeof words - 1, 0);
    words[n > 0 ? n : 0] = '\0';
    words[strcspn(words, "\r\n")] = '\0';
    if (late)
        secret_fail(s, CKPT_USAGE, "%s: credential_process took more than %d s: %.200s", kind,
                    PROCESS_MS / 1000, command);
    else if (pid < 0 || !WIFEXITED(status) || WEXITSTATUS(status) != 0)
        secret_fail(s, CKPT_USAGE, "%s: credential_process failed with status %d: %s", kind,
                    WIFEXITED(status) ? WEXITSTATUS(status) : -1, *words ? words : command);
    else
        secret_json(s, kind, text, "SessionToken");
}

/* A container's credentials may come from these hosts without TLS. */
static bool is_local(const char *url)
{
    static const char *const hosts[] = {"http://127.0.0.1",      "http://localhost",
                                        "http://[::1]",          "http://169.254.170.2",
                                        "http://169.254.170.23", "http://[fd00:ec2::23]"};

    for (size_t i = 0; i < sizeof hosts / sizeof *hosts; i++)
        if (ckpt_has_prefix(url, hosts[i]) && strchr(":/", url[strlen(hosts[i])]))
            return true;
    return ckpt_has_prefix(url, "https://");
}

static bool container(const struct ckpt_site *site, struct ckpt_secret *s)
{
    const char *relative = env("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI");
    const char *full = env("AWS_CONTAINER_CREDENTIALS_FULL_URI");
    ckpt_cleanup(wipep) char *token = ckpt_read_text(env("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"));
    ckpt_cleanup(ckpt_freep) char *url =
        ckpt_asprintf("%s%s", relative ? "http://169.254.170.2" : "",
                      relative ? relative
                      : full   ? full
                               : "");
    ckpt_cleanup(wipe_str) struct ckpt_str answer = {0};
    char why[CURL_ERROR_SIZE];

    if (!url || !*url)
        return false;
    if (!is_local(url)) {
        secret_fail(s, CKPT_USAGE,
                    "AWS_CONTAINER_CREDENTIALS_FULL_URI='%s' is neither https nor a local address",
                    url);
        return true;
    }
    if (token)
        token[strcspn(token, "\r\n")] = '\0';
    const struct request r = {.url = url,
                              .name = "Authorization",
                              .value = token ? token : env("AWS_CONTAINER_AUTHORIZATION_TOKEN"),
                              .timeout_ms = HTTP_MS};
    const long status = request(site, &r, &answer, why);
    if (status == 200)
        secret_json(s, "container", ckpt_str_get(&answer), "Token");
    else
        secret_fail(s, CKPT_IO, "credentials of the container: %s answers %ld %s", url, status,
                    why);
    return true;
}

/* Ask the metadata service of the instance for `path` and `more`: the answer, or "". */
static void imds_ask(const struct ckpt_site *site, struct request r, const char *path,
                     const char *more, struct ckpt_str *answer)
{
    const char *say = env("AWS_EC2_METADATA_SERVICE_ENDPOINT");
    const char *base = say ? say : "http://169.254.169.254";
    const int len = (int)strlen(base) - ckpt_has_suffix(base, "/");
    ckpt_cleanup(ckpt_freep) char *url = ckpt_asprintf("%.*s%s%s", len, base, path, more);
    char why[CURL_ERROR_SIZE];

    r.url = url;
    r.timeout_ms = METADATA_MS;
    if (request(site, &r, answer, why) != 200)
        ckpt_str_clear(answer);
}

/* The role of the machine. False: there is none. */
static bool imds(const struct ckpt_site *site, struct ckpt_secret *s)
{
    static const char roles[] = "/latest/meta-data/iam/security-credentials/";
    ckpt_cleanup(wipe_str) struct ckpt_str token = {0}, role = {0}, answer = {0};
    const struct request first = {
        .method = "PUT", .name = "X-aws-ec2-metadata-token-ttl-seconds", .value = "21600"};

    if (env_is_true("AWS_EC2_METADATA_DISABLED"))
        return false;
    imds_ask(site, first, "/latest/api/token", "", &token);
    if (!token.len)
        return false;
    token.ptr[strcspn(token.ptr, "\r\n")] = '\0';
    const struct request r = {.name = "X-aws-ec2-metadata-token", .value = token.ptr};
    imds_ask(site, r, roles, "", &role);
    if (!role.len)
        return false;
    role.ptr[strcspn(role.ptr, "\r\n")] = '\0';
    imds_ask(site, r, roles, role.ptr, &answer);
    if (answer.len)
        secret_json(s, "instance (IMDSv2)", answer.ptr, "Token");
    return answer.len > 0;
}

/* ---- profiles ---- */

static bool from_profile(const struct ckpt_site *site, const struct profiles *p, const char *name,
                         unsigned hops, struct ckpt_secret *s);

/* Credentials that credential_source names. */
static void from_source(const struct ckpt_site *site, const char *source, struct ckpt_secret *s)
{
    static const struct {
        const char *name;
        bool (*find)(const struct ckpt_site *site, struct ckpt_secret *s);
    } sources[] = {
        {"Environment", environment}, {"EcsContainer", container}, {"Ec2InstanceMetadata", imds}};

    for (size_t i = 0; i < sizeof sources / sizeof *sources; i++)
        if (strcmp(source, sources[i].name) == 0 && sources[i].find(site, s))
            return;
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
    else if (place && !source)
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
    if (environment(site, s))
        return;
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
    else if (!container(site, s) && !imds(site, s))
        secret_fail(s, CKPT_USAGE,
                    "there are no credentials: not in the environment (AWS_ACCESS_KEY_ID), profile "
                    "'%s' of ~/.aws, AWS_WEB_IDENTITY_TOKEN_FILE, a container, or the instance "
                    "(IMDS). For a public bucket: -o anonymous",
                    profile_name());
}
