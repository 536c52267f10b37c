/* SPDX-License-Identifier: Apache-2.0 */
/* The worker: one thread that keeps many requests on their way, repeats those that fail for reasons
 * that pass, and says of the others what the server said. */
#include <curl/curl.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/ckd.h"
#include "base/clock.h"
#include "base/mem.h"
#include "io/bucket/helper/helper.h"
#include "io/bucket/helper/transfers.h"

enum {
    CONNECTIONS = 32, /* the default; small requests may use twice as many then */
    TIMEOUT_MS = 60 * 1000,
    SMALL = 1024 * 1024,
    MOST_ERROR = 64 * 1024, /* of an answer that is an error */
    MOST_LIST = 16 << 20,
    FIRST_PAUSE_MS = 100,
    MOST_PAUSE_MS = 5000,
    RETRIES_PER_SECOND = 50, /* of all requests together */
    REFRESH_S = 300,         /* before credentials expire */
    ASK_AGAIN_MS = 10 * 1000,
    MOST_TURNS = 4, /* other regions and credentials that a request is tried with */
    HOPELESS = 3,   /* attempts to connect to a server that has never answered */
    IMPATIENT = 10, /* after a request that was given up, others are tried for this part of the
                       time, until one succeeds */
    SLOWEST = 4096, /* bytes a second; less is a stall */
    MOST_BUCKETS = 64,
};

static const char EMPTY_SHA256[] =
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

struct job {
    struct job *next;
    struct ckpt_wire_ask q;
    const char *bucket, *key, *third, *more; /* in `text` */
    CURL *easy;                              /* NULL: waits for its turn */
    struct curl_slist *headers;
    struct ckpt_str body; /* of a list, or of an error */
    uint64_t got;         /* bytes of the object that are in their place */
    uint64_t since, not_before;
    unsigned tries, turns;
    uint64_t secrets;     /* number of the credentials that it was signed with */
    enum ckpt_code fault; /* what is wrong with the answer; and `words` */
    char why[CURL_ERROR_SIZE], words[512];
    bool checked;
    char text[];
};

struct known_region {
    char bucket[256], region[64];
};

struct worker {
    const struct ckpt_wire_setup *setup;
    unsigned number;
    const struct ckpt_site *site;
    const char *ca;
    int keeper;
    char *memory;
    struct ckpt_wire_shared *shared;
    struct ckpt_transfers transfers;
    struct job *jobs;
    unsigned active, nlarge, connections, most_small; /* transfers, and those of large parts */
    uint64_t timeout_ms, next_retry;
    bool has_answered;          /* some server, at least once */
    bool is_failing[2];         /* the last question of this kind that ended was given up */
    struct ckpt_secret *secret; /* in pages that no core file has */
    uint64_t secrets;           /* counts them; 0: there are none yet */
    bool asking, has_secret;
    uint64_t asked_ms;
    struct known_region known[MOST_BUCKETS];
    size_t nknown;
    bool gone; /* the client is */
};

/* ---- answers to the client ---- */

/* Answer, and forget the job, which has no transfer any more. */
static void answer(struct worker *w, struct job *j, enum ckpt_code code, uint64_t len,
                   const char *text)
{
    const struct ckpt_wire_answer a = {j->q.id, code, len};
    struct iovec iov[2] = {{(void *)&a, sizeof a}, {(char *)text, strlen(text) + 1}};
    const struct msghdr msg = {.msg_iov = iov, .msg_iovlen = 2};

    if (iov[1].iov_len > CKPT_WIRE_MOST - sizeof a)
        iov[1].iov_len = CKPT_WIRE_MOST - sizeof a;
    while (sendmsg(CKPT_WIRE_SOCKET, &msg, MSG_NOSIGNAL) < 0)
        if (errno != EINTR) {
            w->gone = true;
            break;
        }
    struct job **at = &w->jobs;
    while (*at != j)
        at = &(*at)->next;
    *at = j->next;
    ckpt_str_release(&j->body);
    free(j);
}

static void answer_fail(struct worker *w, struct job *j, enum ckpt_code code, const char *why)
{
    struct ckpt_err err = {0};
    const uint64_t lasted = (ckpt_now_ms() - j->since + 500) / 1000;
    const bool reads = j->q.kind == CKPT_WIRE_GET;
    char tries[64] = "", part[64] = "";

    if (j->tries > 1)
        (void)snprintf(tries, sizeof tries, " (%u attempts in %" PRIu64 " s)", j->tries, lasted);
    if (reads)
        (void)snprintf(part, sizeof part, ", bytes %" PRIu64 " to %" PRIu64, j->q.off,
                       j->q.off + j->q.len);
    (void)ckpt_fail(&err, code, "%s 's3://%s/%s'%s%s%s: %.500s%s", reads ? "reading" : "listing",
                    j->bucket, j->key, part, *w->site->endpoint ? " at " : "", w->site->endpoint,
                    why, tries);
    answer(w, j, err.code, 0, err.text);
}

/* ---- the request ---- */

static struct known_region *known_region(struct worker *w, const char *bucket)
{
    for (size_t i = 0; i < w->nknown; i++)
        if (strcmp(w->known[i].bucket, bucket) == 0)
            return &w->known[i];
    return NULL;
}

static const char *region_of(struct worker *w, const char *bucket)
{
    const struct known_region *k = known_region(w, bucket);

    return k ? k->region : w->site->region;
}

/* False: it is known already. */
static bool learn_region(struct worker *w, const char *bucket, const char *region)
{
    struct known_region *k = known_region(w, bucket);

    if (!*region || strlen(region) >= sizeof k->region ||
        strcmp(region, region_of(w, bucket)) == 0 ||
        strspn(region, "abcdefghijklmnopqrstuvwxyz0123456789-") < strlen(region))
        return false;
    if (!k && w->nknown == MOST_BUCKETS)
        return false;
    k = k ? k : &w->known[w->nknown++];
    (void)snprintf(k->bucket, sizeof k->bucket, "%s", bucket);
    (void)snprintf(k->region, sizeof k->region, "%s", region);
    return true;
}

/* May the bucket be a part of a host's name, with AWS's certificate? */
static bool is_host_label(const char *bucket)
{
    return strspn(bucket, "abcdefghijklmnopqrstuvwxyz0123456789-") == strlen(bucket);
}

static void put_query(struct ckpt_str *url, const char *name, const char *value)
{
    if (!*value)
        return;
    ckpt_str_printf(url, "%s=", name);
    ckpt_url_encode(url, value, false);
    ckpt_str_putc(url, '&');
}

static char *url_of(struct worker *w, const struct job *j)
{
    const char *region = region_of(w, j->bucket);
    const char *china = ckpt_has_prefix(region, "cn-") ? ".cn" : "";
    struct ckpt_str url = {0};

    if (!*w->site->endpoint && is_host_label(j->bucket)) {
        ckpt_str_printf(&url, "https://%s.s3.%s.amazonaws.com%s/", j->bucket, region, china);
    } else {
        if (*w->site->endpoint)
            ckpt_str_printf(&url, "%s/", w->site->endpoint);
        else
            ckpt_str_printf(&url, "https://s3.%s.amazonaws.com%s/", region, china);
        ckpt_url_encode(&url, j->bucket, false);
        if (j->q.kind == CKPT_WIRE_GET)
            ckpt_str_putc(&url, '/');
    }
    if (j->q.kind == CKPT_WIRE_GET) {
        ckpt_url_encode(&url, j->key, true);
    } else { /* the signature wants them sorted */
        ckpt_str_putc(&url, '?');
        put_query(&url, "continuation-token", j->more);
        put_query(&url, "delimiter", j->third);
        ckpt_str_puts(&url, "encoding-type=url&list-type=2&prefix=");
        ckpt_url_encode(&url, j->key, false);
    }
    return url.failed ? NULL : url.ptr;
}

/* A header of the answer; "": it has none. */
static const char *header_of(const struct job *j, const char *name)
{
    struct curl_header *h;

    return curl_easy_header(j->easy, name, 0, CURLH_HEADER, -1, &h) == CURLHE_OK ? h->value : "";
}

static size_t fault(struct job *j, enum ckpt_code code, const char *why)
{
    j->fault = code;
    (void)snprintf(j->words, sizeof j->words, "%s", why);
    return 0;
}

#define REPLACED "the object was replaced since the checkpoint was opened"

/* Lists of some stores have ETags without their quotes. */
static bool is_same_tag(const char *a, const char *b)
{
    const size_t n = strlen(a += *a == '"'), m = strlen(b += *b == '"');
    const size_t na = n - (n && a[n - 1] == '"'), nb = m - (m && b[m - 1] == '"');

    return na == nb && memcmp(a, b, na) == 0;
}

/* Are these the bytes that were asked for, of the object that was asked for? */
static size_t check_head(struct job *j, long status)
{
    const uint64_t from = j->q.off + j->got, end = j->q.off + j->q.len;
    const char *tag = header_of(j, "ETag"), *range = header_of(j, "Content-Range");
    char expected[128], why[512];

    if (*tag && !is_same_tag(tag, j->third))
        return fault(j, CKPT_STALE, REPLACED " (another ETag)");
    (void)snprintf(expected, sizeof expected, "bytes %" PRIu64 "-%" PRIu64 "/%" PRIu64, from,
                   end - 1, j->q.size);
    if ((status == 206 && strcmp(range, expected) == 0) ||
        (status == 200 && from == 0 && end == j->q.size))
        return 1;
    (void)snprintf(why, sizeof why, "the server answers %ld with '%.200s', expected '%s'", status,
                   range, expected);
    return fault(j, CKPT_UNSUPPORTED, why);
}

static size_t on_body(char *data, size_t size, size_t n, void *ctx)
{
    struct job *j = ctx;
    struct worker *w;
    const size_t len = size * n;
    long status = 0;

    (void)curl_easy_getinfo(j->easy, CURLINFO_RESPONSE_CODE, &status);
    (void)curl_easy_getinfo(j->easy, CURLINFO_PRIVATE, &w);
    atomic_fetch_add_explicit(&w->shared->bytes, len, memory_order_relaxed);
    if (j->q.kind != CKPT_WIRE_GET || (status != 200 && status != 206)) {
        if (len > (status == 200 ? MOST_LIST : MOST_ERROR) - j->body.len)
            return fault(j, CKPT_LIMIT, "an answer of the server that is too long");
        ckpt_str_append(&j->body, data, len);
        return len;
    }
    if (!j->checked && !check_head(j, status))
        return 0;
    j->checked = true;
    if (len > j->q.len - j->got)
        return fault(j, CKPT_FORMAT, "the server sends more bytes than were asked for");
    memcpy(w->memory + j->q.at + j->got, data, len);
    j->got += len;
    j->since = ckpt_now_ms();
    return len;
}

static void set_options(struct worker *w, struct job *j, const char *url)
{
    CURL *e = j->easy;
    char range[64];
    struct curl_blob ca = {(char *)w->ca, w->ca ? strlen(w->ca) : 0, CURL_BLOB_NOCOPY};

    (void)curl_easy_setopt(e, CURLOPT_URL, url);
    (void)curl_easy_setopt(e, CURLOPT_PRIVATE, w);
    (void)curl_easy_setopt(e, CURLOPT_ERRORBUFFER, j->why);
    (void)curl_easy_setopt(e, CURLOPT_PROTOCOLS_STR, "http,https");
    (void)curl_easy_setopt(e, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
    (void)curl_easy_setopt(e, CURLOPT_NOSIGNAL, 1L);
    (void)curl_easy_setopt(e, CURLOPT_TCP_KEEPALIVE, 1L);
    (void)curl_easy_setopt(e, CURLOPT_BUFFERSIZE, 256L * 1024);
    (void)curl_easy_setopt(e, CURLOPT_CONNECTTIMEOUT_MS, (long)(w->timeout_ms / 6));
    (void)curl_easy_setopt(e, CURLOPT_LOW_SPEED_LIMIT, (long)SLOWEST);
    (void)curl_easy_setopt(e, CURLOPT_LOW_SPEED_TIME, (long)(w->timeout_ms + 5999) / 6000);
    (void)curl_easy_setopt(e, CURLOPT_WRITEFUNCTION, on_body);
    (void)curl_easy_setopt(e, CURLOPT_WRITEDATA, j);
    if (ca.len)
        (void)curl_easy_setopt(e, CURLOPT_CAINFO_BLOB, &ca);
    if (j->q.kind == CKPT_WIRE_GET) {
        (void)snprintf(range, sizeof range, "%" PRIu64 "-%" PRIu64, j->q.off + j->got,
                       j->q.off + j->q.len - 1);
        (void)curl_easy_setopt(e, CURLOPT_RANGE, range);
        ckpt_header_add(&j->headers, "If-Match", j->third);
    }
    if (!w->site->anonymous) {
        ckpt_header_add(&j->headers, "x-amz-content-sha256",
                        ckpt_has_prefix(url, "https:") ? "UNSIGNED-PAYLOAD" : EMPTY_SHA256);
        ckpt_sign(e, &j->headers, w->secret, region_of(w, j->bucket), "s3");
    }
    (void)curl_easy_setopt(e, CURLOPT_HTTPHEADER, j->headers);
}

static bool is_large(const struct job *j) { return j->q.len > SMALL && j->q.kind == CKPT_WIRE_GET; }

static void job_start(struct worker *w, struct job *j)
{
    ckpt_cleanup(ckpt_freep) char *url = url_of(w, j);

    if (!url || !(j->easy = curl_easy_init())) {
        answer_fail(w, j, CKPT_NOMEM, "out of memory");
        return;
    }
    j->secrets = w->secrets;
    j->fault = CKPT_OK;
    j->checked = false;
    j->why[0] = '\0';
    ckpt_str_clear(&j->body);
    set_options(w, j, url);
    if (j->tries++ == 0)
        j->since = ckpt_now_ms();
    w->active++;
    w->nlarge += is_large(j);
    atomic_fetch_add_explicit(&w->shared->requests, 1, memory_order_relaxed);
    (void)snprintf(w->shared->endpoint, sizeof w->shared->endpoint, "%.*s",
                   (int)(strchr(strstr(url, "//") + 2, '/') - url), url);
    (void)snprintf(w->shared->region, sizeof w->shared->region, "%s", region_of(w, j->bucket));
    (void)curl_multi_add_handle(w->transfers.multi, j->easy);
}

/* ---- its end ---- */

/* Forget the transfer, not the job. */
static void job_stop(struct worker *w, struct job *j)
{
    long connects = 0;

    (void)curl_easy_getinfo(j->easy, CURLINFO_NUM_CONNECTS, &connects);
    atomic_fetch_add_explicit(&w->shared->connections, (uint64_t)connects, memory_order_relaxed);
    (void)curl_multi_remove_handle(w->transfers.multi, j->easy);
    curl_easy_cleanup(j->easy);
    j->easy = NULL;
    ckpt_headers_free(&j->headers);
    w->active--;
    w->nlarge -= is_large(j);
}

static uint64_t random_below(uint64_t n)
{
    uint64_t r = 0;

    return getrandom(&r, sizeof r, 0) == (ssize_t)sizeof r && n ? r % n : 0;
}

/* Try again later, or give up: because of `why`. */
static void retry(struct worker *w, struct job *j, const char *why, bool connected)
{
    const uint64_t patience = w->is_failing[j->q.kind] ? w->timeout_ms / IMPATIENT : w->timeout_ms;
    const uint64_t now = ckpt_now_ms(), left = j->tries < 8 ? j->tries : 8;
    const uint64_t pause = ckpt_min_u64(MOST_PAUSE_MS, (uint64_t)FIRST_PAUSE_MS << left);

    j->not_before = now + random_below(pause) + 1;
    if (j->not_before < w->next_retry)
        j->not_before = w->next_retry;
    if (j->not_before > j->since + patience ||
        (!w->has_answered && !connected && j->tries >= HOPELESS)) {
        w->is_failing[j->q.kind] = true;
        answer_fail(w, j, CKPT_IO, why);
        return;
    }
    w->next_retry = (w->next_retry > now ? w->next_retry : now) + 1000 / RETRIES_PER_SECOND;
    atomic_fetch_add_explicit(&w->shared->retries, 1, memory_order_relaxed);
}

/* May the same request succeed later? *ret_connected: was there a server? */
static bool is_passing(CURLcode rc, bool *ret_connected)
{
    enum { WITHOUT_SERVER = 4 }; /* the first of the codes */
    static const CURLcode codes[] = {CURLE_COULDNT_RESOLVE_HOST, CURLE_COULDNT_RESOLVE_PROXY,
                                     CURLE_COULDNT_CONNECT,      CURLE_SSL_CONNECT_ERROR,
                                     CURLE_RECV_ERROR,           CURLE_GOT_NOTHING,
                                     CURLE_PARTIAL_FILE,         CURLE_OPERATION_TIMEDOUT,
                                     CURLE_SEND_ERROR,           CURLE_WEIRD_SERVER_REPLY};
    size_t i = 0;

    while (i < sizeof codes / sizeof *codes && rc != codes[i])
        i++;
    *ret_connected = i >= WITHOUT_SERVER;
    return i < sizeof codes / sizeof *codes;
}

/* Would other credentials help? */
static bool is_of_secret(const char *code)
{
    return strcmp(code, "ExpiredToken") == 0 || strcmp(code, "ExpiredTokenException") == 0 ||
           strcmp(code, "TokenRefreshRequired") == 0 || strcmp(code, "InvalidToken") == 0 ||
           strcmp(code, "RequestExpired") == 0;
}

/* The server has answered, but not what was asked for. */
static void refused(struct worker *w, struct job *j, long status, char *region, size_t cap)
{
    char code[128], words[600], why[1024];
    const char *xml = ckpt_str_get(&j->body);

    ckpt_xml_text(xml, j->body.len, "Code", code, sizeof code);
    ckpt_xml_text(xml, j->body.len, "Message", words, sizeof words);
    if (!*region)
        ckpt_xml_text(xml, j->body.len, "Region", region, cap);
    (void)snprintf(why, sizeof why, "the server answers %ld%s%s%s%s", status, *code ? " " : "",
                   code, *words ? ": " : "", words);
    if (j->turns < MOST_TURNS && (status == 301 || status == 307 || status == 400) &&
        learn_region(w, j->bucket, region)) {
        j->turns++;
        j->tries--;
        return;
    }
    if (j->turns < MOST_TURNS && !w->site->anonymous && is_of_secret(code)) {
        j->turns++;
        if (j->secrets == w->secrets)
            w->has_secret = false; /* get others */
        return;
    }
    if (status >= 500 || status == 408 || status == 429 || strcmp(code, "RequestTimeout") == 0 ||
        strcmp(code, "SlowDown") == 0)
        retry(w, j, why, true);
    else if (j->q.kind == CKPT_WIRE_GET && (status == 412 || status == 416))
        answer_fail(w, j, CKPT_STALE, REPLACED " (the server answers 412 or 416)");
    else if (j->q.kind == CKPT_WIRE_GET && status == 404)
        answer_fail(w, j, CKPT_STALE, "the object was removed since the checkpoint was opened");
    else
        answer_fail(w, j, CKPT_IO, why);
}

static void finish_list(struct worker *w, struct job *j)
{
    struct ckpt_err err = {0};
    char more[CKPT_WIRE_MOST / 2];
    uint64_t len;

    if (ckpt_xml_list(ckpt_str_get(&j->body), j->body.len, w->memory + j->q.at, j->q.len, &len,
                      more, sizeof more, &err) < 0)
        answer_fail(w, j, err.code, err.text);
    else
        answer(w, j, CKPT_OK, len, more);
}

static void finish(struct worker *w, struct job *j, CURLcode rc)
{
    char why[CURL_ERROR_SIZE], region[64];
    bool connected;
    long status = 0;

    (void)curl_easy_getinfo(j->easy, CURLINFO_RESPONSE_CODE, &status);
    (void)snprintf(region, sizeof region, "%s", header_of(j, "x-amz-bucket-region"));
    job_stop(w, j);
    w->has_answered |= status != 0;
    (void)snprintf(why, sizeof why, "%s", *j->why ? j->why : curl_easy_strerror(rc));
    const bool good = status == 200 || status == 206;
    w->is_failing[j->q.kind] &= !(rc == CURLE_OK && good);
    if (j->fault)
        answer_fail(w, j, j->fault, j->words);
    else if (good && j->q.kind == CKPT_WIRE_GET && j->got == j->q.len)
        answer(w, j, CKPT_OK, j->q.len, "");
    else if (rc == CURLE_OK && good && j->q.kind == CKPT_WIRE_LIST_PAGE)
        finish_list(w, j);
    else if (rc == CURLE_OK && good)
        retry(w, j, "the server sends fewer bytes than it was asked for", true);
    else if (rc == CURLE_OK)
        refused(w, j, status, region, sizeof region);
    else if (is_passing(rc, &connected))
        retry(w, j, why, connected);
    else
        answer_fail(w, j, CKPT_IO, why);
}

/* ---- questions, and credentials ---- */

/* A job for a question of n bytes; NULL: no memory, or no question. */
static struct job *job_new(const struct ckpt_wire_ask *q, size_t n)
{
    struct job *j =
        n > sizeof *q && q->kind <= CKPT_WIRE_LIST_PAGE ? calloc(1, sizeof *j + n) : NULL;

    if (!j)
        return NULL;
    const char **const texts[] = {&j->bucket, &j->key, &j->third, &j->more};
    const char *at = j->text, *end = at + n - sizeof *q;
    memcpy(j->text, q + 1, n - sizeof *q);
    j->q = *q;
    j->since = ckpt_now_ms();
    for (size_t i = 0; i < 4; i++) {
        *texts[i] = at;
        at += at < end ? strlen(at) + 1 : 0;
    }
    return j;
}

static void take_asks(struct worker *w)
{
    struct ckpt_wire_ask m[CKPT_WIRE_MOST / sizeof(struct ckpt_wire_ask) + 1];
    ssize_t n;

    while ((n = recv(CKPT_WIRE_SOCKET, m, sizeof m, MSG_DONTWAIT)) > 0) {
        struct job *j = job_new(m, (size_t)n), **last = &w->jobs;
        if (!j) { /* nothing can be said */
            w->gone = true;
            return;
        }
        if (j->q.worker != w->number) {
            free(j);
            continue;
        }
        while (*last)
            last = &(*last)->next;
        *last = j;
        if (j->q.at > w->setup->memory || j->q.len > w->setup->memory - j->q.at)
            answer_fail(w, j, CKPT_USAGE, "a place outside of the memory");
    }
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR))
        w->gone = true;
}

/* The keeper's answer. */
static void take_secret(struct worker *w)
{
    struct ckpt_secret *s = w->secret + 1;
    const ssize_t n = recv(w->keeper, s, sizeof *s, MSG_DONTWAIT);

    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    w->asking = false;
    if (n != (ssize_t)sizeof *s) {
        w->gone = true;
    } else if (s->code == CKPT_OK) {
        *w->secret = *s;
        w->secrets++;
        w->has_secret = true;
        (void)snprintf(w->shared->credentials, sizeof w->shared->credentials, "%s", s->kind);
    } else if (!w->has_secret || w->secret->expires <= time(NULL)) {
        w->has_secret = false;
        for (struct job *j = w->jobs, *next; j; j = next) {
            next = j->next;
            if (!j->easy)
                answer_fail(w, j, s->code, s->text);
        }
    }
    explicit_bzero(s, sizeof *s);
}

/* Are there credentials to sign with? Asks for them. */
static bool have_secret(struct worker *w)
{
    const time_t now = time(NULL);
    const uint64_t expires = w->has_secret && w->secret->expires ? (uint64_t)w->secret->expires : 0;
    const bool soon = expires && (uint64_t)now + REFRESH_S >= expires;
    const bool again = ckpt_now_ms() - w->asked_ms >= ASK_AGAIN_MS;

    if (w->site->anonymous)
        return true;
    if (!w->asking && (!w->has_secret || (soon && again))) {
        w->asking = send(w->keeper, "", 1, MSG_NOSIGNAL) == 1;
        w->asked_ms = ckpt_now_ms();
        w->gone |= !w->asking;
    }
    return w->has_secret && !(expires && (uint64_t)now >= expires);
}

/* Start what may be started; the milliseconds until the next one may be. */
static int start_jobs(struct worker *w)
{
    const uint64_t now = ckpt_now_ms();
    uint64_t wait = 1000;

    if (!w->jobs || !have_secret(w))
        return (int)wait;
    for (struct job *j = w->jobs, *next; j && w->active < w->most_small; j = next) {
        next = j->next;
        if (j->easy || (is_large(j) && w->nlarge >= w->connections))
            continue;
        if (j->not_before > now)
            wait = ckpt_min_u64(wait, j->not_before - now);
        else
            job_start(w, j);
    }
    return (int)wait;
}

/* True: there were some. */
static bool take_finished(struct worker *w)
{
    const CURLMsg *m;
    bool any = false;
    int left;

    while ((m = curl_multi_info_read(w->transfers.multi, &left))) {
        struct job *j = w->jobs;
        const CURLcode rc = m->data.result;
        while (j && j->easy != m->easy_handle)
            j = j->next;
        if (m->msg == CURLMSG_DONE && j)
            finish(w, j, rc);
        any = true;
    }
    return any;
}

/* A transfer has gone on: no job must wait where others have ended. */
static void next(void *ctx)
{
    if (take_finished(ctx))
        (void)start_jobs(ctx);
}

int ckpt_worker_run(const struct ckpt_wire_setup *setup, unsigned number,
                    const struct ckpt_site *site, const char *ca, int keeper, void *memory)
{
    static struct worker w; /* the process ends with it: jobs are not freed */
    const size_t len = 2 * sizeof *w.secret;

    w = (struct worker){.setup = setup,
                        .number = number,
                        .site = site,
                        .ca = ca,
                        .keeper = keeper,
                        .memory = memory,
                        .shared = memory};
    w.connections = setup->connections ? setup->connections : CONNECTIONS;
    w.most_small = setup->connections ? setup->connections : 2 * CONNECTIONS;
    w.timeout_ms = setup->timeout_ms ? setup->timeout_ms : TIMEOUT_MS;
    w.secret = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (w.secret == MAP_FAILED ||
        ckpt_transfers_init(&w.transfers, w.most_small, (int[]){CKPT_WIRE_SOCKET, keeper}, 2) < 0)
        return 1;
    (void)madvise(w.secret, len, MADV_DONTDUMP);
    if (site->anonymous)
        (void)snprintf(w.shared->credentials, sizeof w.shared->credentials, "none (anonymous)");
    while (!w.gone) {
        const int wait = start_jobs(&w);
        if (!ckpt_transfers_serve(&w.transfers, w.jobs ? wait : 60 * 1000, next, &w))
            break;
        take_asks(&w);
        take_secret(&w);
    }
    explicit_bzero(w.secret, len);
    return 0;
}
