/* SPDX-License-Identifier: Apache-2.0 */
/* Reading files back for their hashes, each byte once, whatever number of processes takes part.
 *
 * The hash of a file is computed from its beginning to its end, but reading takes longer by far: a
 * process claims a unit and reads it into memory; when the hash of all bytes before it is known, it
 * adds its own, and hands the state on to the process that has the next unit, by a line of its
 * journal. On the way, each unit is compared with what its writer has recorded of it. */
#define XXH_STATIC_LINKING_ONLY /* for the size of a state, and its pointer */
#include <xxhash.h>

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/fdio.h"
#include "base/mem.h"
#include "base/par.h"
#include "common.h"
#include "tool/export/export.h"
#include "tool/pump.h"

/* Between two looks for the state of another process: as many journals are looked at as there are
 * parts. */
enum { POLL_MS = 20, POLL_PART_MS = 2 };

/* ---- a state as a text ---- */

/* A state holds one pointer, to the constants of the library, which are elsewhere in every process.
 */
static char *text_of(const XXH3_state_t *state)
{
    XXH3_state_t copy = *state;
    const unsigned char *bytes = (const unsigned char *)&copy;
    char *text = malloc(2 * sizeof copy + 1);

    copy.extSecret = NULL;
    for (size_t i = 0; text && i < sizeof copy; i++)
        (void)snprintf(text + 2 * i, 3, "%02x", bytes[i]);
    return text;
}

/* Begin with the state of this text, or with none (NULL). False: it is not a state. */
static bool begin_state(XXH3_state_t *state, const char *text)
{
    (void)XXH3_128bits_reset(state);
    const unsigned char *secret = state->extSecret;
    unsigned char *bytes = (unsigned char *)state;

    if (!text)
        return true;
    if (strlen(text) != 2 * sizeof *state || strspn(text, "0123456789abcdef") != 2 * sizeof *state)
        return false;
    for (size_t i = 0; i < sizeof *state; i++) {
        const char digits[3] = {text[2 * i], text[2 * i + 1], '\0'};
        bytes[i] = (unsigned char)strtoul(digits, NULL, 16);
    }
    state->extSecret = secret;
    /* what the library uses as indices */
    return state->bufferedSize <= XXH3_INTERNALBUFFER_SIZE &&
           state->nbStripesSoFar <= state->nbStripesPerBlock &&
           state->nbStripesPerBlock == (XXH3_SECRET_DEFAULT_SIZE - 64) / 8 &&
           state->secretLimit == XXH3_SECRET_DEFAULT_SIZE - 64;
}

/* ---- reading ---- */

/* The unit that this process reads. */
struct reading {
    struct exporting *x;
    size_t item, unit;
    uint64_t from, to;
    int fd;
    char *buf; /* its bytes */
};

static int read_chunk(void *ctx, size_t i, struct ckpt_err *err)
{
    const struct reading *r = ctx;
    uint64_t at = r->from + i * CKPT_PUMP_CHUNK;
    const uint64_t left = r->to - at;
    const size_t len = left < CKPT_PUMP_CHUNK ? (size_t)left : CKPT_PUMP_CHUNK;
    const int rc = ckpt_fdio_pread(r->fd, r->buf + (at - r->from), len, &at);

    return rc ? ckpt_fail_errno(err, ckpt_fdio_errno(rc), "reading %s/%s/%s at %" PRIu64,
                                r->x->job.path, ckpt_job_files, r->x->items->item[r->item].path, at)
              : 0;
}

static int read_unit(struct reading *r, struct ckpt_err *err)
{
    const uint64_t len = r->to - r->from;

    r->buf = malloc(len ? (size_t)len : 1);
    return !r->buf ? ckpt_nomem(err)
                   : ckpt_parallel((size_t)((len + CKPT_PUMP_CHUNK - 1) / CKPT_PUMP_CHUNK),
                                   ckpt_pump_jobs(r->x->jobs), read_chunk, r, err);
}

static bool is_same(XXH128_hash_t got, const XXH128_hash_t *want)
{
    return XXH128_isEqual(got, *want);
}

/* Does the unit's hash, or that of the file up to its end, contradict what was written? */
static int check_unit(const struct reading *r, const XXH3_state_t *state, struct ckpt_err *err)
{
    const struct exporting *x = r->x;
    const struct ckpt_file_done *file = &x->done.file[r->item];
    const struct ckpt_unit_done *unit = &x->done.unit[r->unit];
    bool any = unit->is,
         good = any && is_same(XXH3_128bits(r->buf, (size_t)(r->to - r->from)), &unit->hash);

    /* There may be several prefixes of one length, one of which was lost when a machine went down.
     */
    for (size_t i = 0; !unit->is && i < file->prefix.len; i++)
        if (file->prefix.ptr[i].len == r->to) {
            any = true;
            good = good || is_same(XXH3_128bits_digest(state), &file->prefix.ptr[i].hash);
        }
    return good || !any
               ? 0
               : ckpt_fail(err, CKPT_CONFLICT,
                           "%s/%s/%s: bytes %" PRIu64 " to %" PRIu64
                           " are not those that were written there: the storage has lost them, or "
                           "something else writes there; remove %s and export again",
                           x->job.path, ckpt_job_files, x->items->item[r->item].path, r->from,
                           r->to, x->job.path);
}

/* Add the unit to the hash of what is before it, and hand that on. */
static int add_unit(struct reading *r, struct ckpt_err *err)
{
    struct exporting *x = r->x;
    XXH3_state_t *state = XXH3_createState();
    int rc = state ? 0 : ckpt_nomem(err);

    if (rc == 0 && !begin_state(state, x->done.file[r->item].state))
        rc = ckpt_fail(err, CKPT_FORMAT,
                       "%s: a journal has a hash of %s that is none: remove that folder and export "
                       "again",
                       x->job.path, x->items->item[r->item].path);
    if (rc == 0) {
        (void)XXH3_128bits_update(state, r->buf, (size_t)(r->to - r->from));
        rc = check_unit(r, state, err);
    }
    if (rc == 0 && r->to == x->items->item[r->item].size) { /* all bytes are hashed */
        const XXH128_hash_t hash = XXH3_128bits_digest(state);
        rc = ckpt_export_complete(x, r->item, r->fd, &hash, err);
    } else if (rc == 0) {
        ckpt_cleanup(ckpt_freep) char *text = text_of(state);
        rc = !text ? ckpt_nomem(err)
                   : ckpt_job_add(&x->job,
                                  json_pack("{s:o, s:I, s:s}", "file",
                                            ckptfs_json_text(x->items->item[r->item].path),
                                            "hashed", (json_int_t)r->to, "state", text),
                                  err);
    }
    (void)XXH3_freeState(state);
    return rc;
}

/* ---- taking turns ---- */

/* Try to get a unit for this process: 1, 0 (another one that lives has it) or -1. */
static int claim(struct exporting *x, size_t unit, struct ckpt_err *err)
{
    size_t holder;
    char id[24];

    (void)snprintf(id, sizeof id, "h%zu", unit);
    return ckpt_job_claim(&x->job, id, false, &holder, err);
}

/* The unit at which the file's hash has arrived. */
static size_t frontier(const struct exporting *x, size_t item)
{
    return x->spans.first[item] + x->done.file[item].hashed / x->spans.cut;
}

/* Wait until all before the unit is hashed. *ret_turn: 1; 0: nobody who lives does that, or the
 * unit is done already. */
static int await_turn(const struct reading *r, bool *ret_turn, struct ckpt_err *err)
{
    struct exporting *x = r->x;

    for (;;) {
        const size_t at = frontier(x, r->item);
        *ret_turn = at == r->unit;
        if (at >= r->unit || x->done.file[r->item].whole)
            return 0;
        const int mine = claim(x, at, err);
        if (mine < 0)
            return -1;
        if (mine) { /* its holder may have handed on the hash, and ended */
            if (ckpt_rest_refresh(x, err) < 0)
                return -1;
            if (frontier(x, r->item) == at)
                return 0;
            continue;
        }
        ckpt_pause_ms(POLL_MS + (uint64_t)POLL_PART_MS * x->part.count);
        if (ckpt_rest_refresh(x, err) < 0)
            return -1;
    }
}

/* Read one unit, and hash it when its turn comes. *ret: it is hashed. */
static int take_unit(struct reading *r, bool *ret, struct ckpt_err *err)
{
    bool turn = false;
    const int rc =
        read_unit(r, err) < 0 || await_turn(r, &turn, err) < 0 || (turn && add_unit(r, err) < 0)
            ? -1
            : 0;

    free(ckpt_steal(&r->buf));
    *ret = turn;
    return rc;
}

/* Take part in reading back a file, as long as there is a unit that nobody has. */
static int take_file(struct exporting *x, size_t item, bool *ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *temp = ckpt_export_temp(x->items->item[item].path);
    struct reading r = {.x = x, .item = item};

    if (!temp)
        return ckpt_nomem(err);
    for (size_t unit = frontier(x, item); unit < x->spans.first[item + 1];) {
        const int mine = claim(x, unit, err);
        if (mine < 0 || (mine && ckpt_rest_refresh(x, err) < 0))
            return -1;
        if (x->done.file[item].whole)
            return 0;
        if (!mine || unit < frontier(x, item)) {
            unit++;
            continue;
        }
        (void)ckpt_spans_place(&x->spans, x->items, unit, &r.from, &r.to);
        r.unit = unit;
        ckpt_cleanup(ckpt_closep) int fd =
            openat(x->job.files, temp, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
        if (fd < 0)
            return ckpt_fail_errno(err, errno, "%s/%s/%s", x->job.path, ckpt_job_files, temp);
        r.fd = fd;
        *ret = true;
        bool hashed;
        if (take_unit(&r, &hashed, err) < 0 || ckpt_rest_refresh(x, err) < 0)
            return -1;
        unit = hashed ? unit + 1 : frontier(x, item); /* somebody has died: do that first */
        if (x->done.file[item].whole)
            return 0;
    }
    return 0;
}

int ckpt_readback(struct exporting *x, bool *ret, struct ckpt_err *err)
{
    *ret = false;
    for (size_t i = 0; i < x->items->n; i++) {
        if (x->done.file[i].whole || !ckpt_done_has_all(&x->done, i))
            continue;
        if (XXH_versionNumber() != XXH_VERSION_NUMBER)
            return ckpt_fail(err, CKPT_UNSUPPORTED,
                             "this program was built with xxHash %d and runs with %u: a file that "
                             "was cut cannot be hashed; export with one process into another "
                             "directory",
                             XXH_VERSION_NUMBER, XXH_versionNumber());
        if (take_file(x, i, ret, err) < 0)
            return -1;
    }
    return 0;
}

/* ---- a file that is whole ---- */

bool ckpt_readback_is_intact(const struct exporting *x, size_t item)
{
    ckpt_cleanup(ckpt_closep) int fd =
        openat(x->job.files, x->items->item[item].path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    ckpt_cleanup(ckpt_freep) char *buf = malloc(CKPT_PUMP_CHUNK);
    XXH3_state_t *state = XXH3_createState();
    const uint64_t size = x->items->item[item].size;
    uint64_t off = 0;

    if (state)
        (void)XXH3_128bits_reset(state);
    while (fd >= 0 && buf && state && off < size) {
        const size_t len = size - off < CKPT_PUMP_CHUNK ? (size_t)(size - off) : CKPT_PUMP_CHUNK;
        if (ckpt_fdio_pread(fd, buf, len, &off) != 0)
            break;
        (void)XXH3_128bits_update(state, buf, len);
    }
    const bool same = fd >= 0 && state && off == size &&
                      is_same(XXH3_128bits_digest(state), &x->done.file[item].hash);
    (void)XXH3_freeState(state);
    return same;
}
