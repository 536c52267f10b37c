/* SPDX-License-Identifier: Apache-2.0 */
/* Read-ahead recognises streams: reads that follow each other, though threads make them not quite
 * in order. A stream may run from one file into the next, so positions are counted from the
 * beginning of the view's first file (ckpt_vnode.at). Who reads tensor by tensor may follow the
 * order of the state dict instead, in which layer 2 comes before layer 10: where that is another
 * order, its positions are counted, too, and the order in which reads jump less is followed.
 *
 * A reader that has read n bytes in a row will probably read as many again. So the distance that is
 * fetched ahead grows with what a stream has read (EAGER times as much), up to a limit that all
 * streams which are being read share (AHEAD_...). A read here and a read there are no stream, and
 * nothing is fetched for them. */
#include "view/ahead.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "base/ckd.h"
#include "tensor/strided.h"

enum {
    /* Streams that are told apart. With fewer, a loader of many threads would push its own streams
     * out; a search through more would cost each read time. */
    NSTREAM = 64,

    /* A read belongs to a stream if it lies within so many bytes of the stream's end: threads that
     * share a file are so far out of order. Half of it loses readers of 8 MiB blocks in 2 threads;
     * twice as much begins to join neighbouring tensors that nobody reads in a row. */
    NEAR = 16 << 20,

    /* A stream has read so many bytes before anything is fetched ahead of it. Headers and small
     * tensors, which are read at random, are shorter. */
    LEAST = 1 << 20,

    /* So many times the bytes that a stream has read are fetched ahead. A small factor finds long
     * streams too late; a large one fetches much that a reader who stops early never wants. */
    EAGER = 8,

    /* Bytes that are fetched ahead of all streams together: what a fast network delivers within a
     * few round trips. Each of 32 connections has a part under way, also when a quarter has been
     * read and not yet asked for again. For files, of which parts are half as large, it is half as
     * much, within the memory for them. */
    AHEAD_OBJECTS = 320 << 20,
    AHEAD_FILES = 160 << 20,

    /* Fetching ahead ends at multiples of it, as the parts of files do that are passed through.
     * With less, a long stream has small parts among large ones. */
    STEP = 8 << 20,

    /* The last bytes of what is read to its end, of a small view the last LAST_SHARE-th, are
     * fetched in parts of at most LAST_PART, so that all connections have something to do until
     * the end. Half as large parts wait for round trips as long as for bytes; twice as large ones
     * leave connections idle for as long as one takes. */
    LAST = 128 << 20,
    LAST_SHARE = 8,
    LAST_PART = 2 << 20,

    /* Requests that are smaller than that, on average, take longer than their bytes. */
    SCATTERED = 1 << 20,

    /* A stream counts as being read, and so shares that, for so many reads after its last one. */
    RECENT = 512,

    /* A read that begins a stream; with each read a JUMPS_FADE-th of all that is forgotten. With
     * fewer, one tensor that is read out of order decides; with more, a reader that changes its
     * order is noticed late. */
    JUMP = 1 << 16,
    JUMPS_FADE = 64,
};

/* The first bytes of what is read to its end are fetched in smaller parts. Parts of one size that
 * are asked for at the same time come at the same time, the first no sooner than the last; of these
 * the first come soon, and from then on one comes after the other. */
static const struct {
    uint64_t end, part;
} first_parts[] = {{4 << 20, 1 << 20}, {12 << 20, 2 << 20}, {28 << 20, 4 << 20}};

struct stream {
    uint64_t first;      /* where it began */
    uint64_t next;       /* the end of its furthest read */
    uint64_t read_bytes; /* the sum of its reads */
    uint64_t tick;       /* the number of its last read; 0: this stream is unused */
    uint64_t fetched_to; /* everything before this position is here or on its way */
    uint64_t retry_from; /* after a lack of room: fetch again once a read comes to here */
};

/* The streams of one order. */
struct order {
    uint64_t tick;  /* the number of reads so far */
    uint64_t jumps; /* JUMP for each that began a stream, less and less the longer ago that was */
    uint64_t whole; /* bytes of the files, if all of them are read in order; else 0 */
    struct stream stream[NSTREAM];
};

struct ckpt_ahead {
    pthread_mutex_t lock;
    uint64_t most;            /* bytes ahead of all streams of an order together */
    atomic_bool is_scattered; /* what was fetched last took many small requests */
    struct order files, tensors;
    struct ckpt_vnode listed; /* the tensors one after the other in the catalogue's order; has no
                                 segments if files have that order, too */
    struct ckpt_segment *segment;
};

/* Do the tensors lie in the files in the catalogue's order, each in one piece? */
static bool is_in_order(const struct ckpt_vtree *tree, size_t ntensor)
{
    uint64_t last = 0;

    for (size_t i = 0; i < ntensor; i++) {
        const struct ckpt_vnode *file;
        uint64_t at;
        ckpt_vtree_place(tree, i, &file, &at);
        if (!file || file->at + at < last)
            return false;
        last = file->at + at;
    }
    return true;
}

static int list_tensors(struct ckpt_ahead *a, const struct ckpt_catalog *cat, struct ckpt_err *err)
{
    const size_t n = cat->tensors.len;

    if (!(a->segment = calloc(n + 1, sizeof *a->segment)))
        return ckpt_nomem(err);
    for (size_t i = 0; i < n; i++) {
        const struct ckpt_tensor *t = &cat->tensors.ptr[i];
        a->segment[i] = ckpt_segment_tensor(t, 0, ckpt_tensor_nbytes(t));
        a->segment[i].off = a->listed.size;
        a->listed.size += a->segment[i].len;
    }
    a->listed.segment = a->segment;
    a->listed.nsegment = n;
    return 0;
}

int ckpt_ahead_new(const struct ckpt_catalog *cat, const struct ckpt_vtree *tree,
                   struct ckpt_ahead **ret, struct ckpt_err *err)
{
    struct ckpt_source *far = NULL;

    *ret = NULL;
    for (size_t i = 0; i < cat->sources.len && !far; i++)
        if (ckpt_source_is_far(cat->sources.ptr[i]))
            far = cat->sources.ptr[i];
    if (!far)
        return 0;
    if (!(*ret = calloc(1, sizeof **ret)))
        return ckpt_nomem(err);
    (*ret)->most = ckpt_source_is_object(far) ? AHEAD_OBJECTS : AHEAD_FILES;
    (void)pthread_mutex_init(&(*ret)->lock, NULL);
    return is_in_order(tree, cat->tensors.len) ? 0 : list_tensors(*ret, cat, err);
}

void ckpt_ahead_free(struct ckpt_ahead *a)
{
    if (a) {
        (void)pthread_mutex_destroy(&a->lock);
        free(a->segment);
    }
    free(a);
}

/* The multiple of STEP below a position, if so little does not matter for the distance. */
static uint64_t step_below(uint64_t to, uint64_t distance)
{
    return distance > 4 * (uint64_t)STEP ? to - to % STEP : to;
}

/* Positions [from, to) are to be fetched ahead of a stream; none if to <= from. */
struct request {
    struct order *order;
    struct stream *stream;
    uint64_t end; /* of the read */
    uint64_t from, to;
};

/* Notes a read of positions [off, end): finds or begins its stream. With the lock held. */
static struct request note(struct ckpt_ahead *a, struct order *order, uint64_t off, uint64_t end)
{
    struct stream *mine = NULL, *oldest = &order->stream[0];
    uint64_t active = 1, to = 0;

    order->tick++;
    for (size_t i = 0; i < NSTREAM; i++) {
        struct stream *s = &order->stream[i];
        if (s->tick && off + NEAR >= s->next && off <= s->next + NEAR)
            mine = s;
        else if (s->tick && s->tick + RECENT > order->tick)
            active++;
        if (s->tick < oldest->tick)
            oldest = s;
    }
    order->jumps -= order->jumps / JUMPS_FADE;
    if (!mine) {
        *(mine = oldest) = (struct stream){.first = off, .next = end};
        order->jumps += JUMP;
    }
    mine->tick = order->tick;
    mine->next = ckpt_max_u64(mine->next, end);
    mine->read_bytes += end - off;
    /* At least half of what lies between its first and its last byte was read: it is a stream. */
    if (mine->first != off && mine->read_bytes >= LEAST &&
        2 * mine->read_bytes >= mine->next - mine->first) {
        const uint64_t distance = ckpt_min_u64(EAGER * mine->read_bytes, a->most / active);
        mine->fetched_to = ckpt_max_u64(mine->fetched_to, end);
        /* A quarter of the distance is asked for at once, not a little at each read. With half of
         * it a link is idle for longer; with less what lies in many files is asked for in smaller
         * parts, so that of such a view it is half. */
        const uint64_t step = distance / (atomic_load(&a->is_scattered) ? 2 : 4);
        if (end >= mine->retry_from && mine->fetched_to < mine->next + distance - step)
            to = step_below(mine->next + distance, distance);
    }
    return (struct request){order, mine, end, mine->fetched_to, to};
}

/* Adds to the batch what a read of bytes [off, end) of the file reads of its sources. */
static int add(struct ckpt_batch *batch, const struct ckpt_reading *rd,
               const struct ckpt_vnode *file, uint64_t off, uint64_t end)
{
    int rc = 0;

    for (size_t i = ckpt_segment_at(file, off);
         rc == 0 && i < file->nsegment && file->segment[i].off < end; i++) {
        const struct ckpt_segment *s = &file->segment[i];
        const uint64_t lo = off > s->off ? off - s->off : 0;
        const uint64_t hi = ckpt_min_u64(s->len, end - s->off);
        if (lo < hi && s->kind == CKPT_SEGMENT_SOURCE)
            rc = ckpt_batch_add(batch, s->source, NULL, hi - lo, lo, NULL);
        if (lo < hi && s->kind == CKPT_SEGMENT_TENSOR) {
            const size_t esize = ckpt_dtype_size(s->tensor->dtype);
            rc = ckpt_tensor_prefetch(s->tensor, rd, (s->from + lo) / esize,
                                      (s->from + hi + esize - 1) / esize, batch, NULL);
        }
    }
    return rc;
}

/* Begins to fetch bytes [off, end), which lie in this file and the ones after it, in parts of at
 * most `part` bytes (0: as large as they may be). False: there was no room for all of them. */
static bool fetch(struct ckpt_ahead *a, const struct ckpt_reading *rd,
                  const struct ckpt_vnode *file, uint64_t off, uint64_t end, uint64_t part)
{
    const uint64_t len = end - off;
    struct ckpt_batch batch;
    int rc = 0;

    ckpt_batch_init(&batch, CKPT_READ_PREFETCH);
    batch.part = part;
    for (; rc == 0 && file && file->at < end; file = file->next)
        if (off < file->at + file->size)
            rc = add(&batch, rd, file, off > file->at ? off - file->at : 0,
                     ckpt_min_u64(end - file->at, file->size));
    const bool good = rc == 0 && ckpt_batch_fetch(&batch, CKPT_STRIDED_GAP);
    if (len > STEP)
        atomic_store(&a->is_scattered, batch.runs.len > len / SCATTERED);
    ckpt_batch_release(&batch);
    return good;
}

/* Begins to fetch these bytes, in parts of the sizes that their place asks for. `whole`: bytes of
 * the files, if all of them are read in order. */
static bool fetch_all(struct ckpt_ahead *a, const struct ckpt_reading *rd,
                      const struct ckpt_vnode *file, uint64_t off, uint64_t end, uint64_t whole)
{
    const uint64_t last = whole - ckpt_min_u64(LAST, whole / LAST_SHARE);
    bool good = true;

    if (!whole)
        return fetch(a, rd, file, off, end, 0);
    while (good && off < end) {
        uint64_t stop = off < last ? ckpt_min_u64(end, last) : end;
        uint64_t part = off < last ? 0 : LAST_PART;
        for (size_t i = sizeof first_parts / sizeof *first_parts; i-- > 0;)
            if (off < first_parts[i].end) {
                stop = ckpt_min_u64(stop, first_parts[i].end);
                part = first_parts[i].part;
            }
        good = fetch(a, rd, file, off, stop, part);
        off = stop;
    }
    return good;
}

/* Says that this is being fetched. With the lock held. */
static void claim(const struct request *r)
{
    r->stream->fetched_to = ckpt_max_u64(r->stream->fetched_to, r->to);
}

/* Begins to fetch it; positions begin in this file. */
static void answer(struct ckpt_reading *rd, const struct request *r, const struct ckpt_vnode *file)
{
    struct ckpt_ahead *a = rd->ahead;

    if (r->to <= r->from || fetch_all(a, rd, file, r->from, r->to, r->order->whole))
        return;
    (void)pthread_mutex_lock(&a->lock);
    if (r->stream->fetched_to == r->to) { /* no other thread has gone on meanwhile */
        r->stream->fetched_to = r->from;
        r->stream->retry_from = r->end + (r->to - r->end) / 16; /* reads have made room by then */
    }
    (void)pthread_mutex_unlock(&a->lock);
}

void ckpt_ahead_note(struct ckpt_reading *rd, const struct ckpt_vnode *file, uint64_t off,
                     uint64_t end)
{
    struct ckpt_ahead *a = rd->ahead;

    /* where another thread has the lock one read less is noted, and no read waits */
    if (!a || off == end || pthread_mutex_trylock(&a->lock) != 0)
        return;
    const struct request r = note(a, &a->files, file->at + off, file->at + end);
    claim(&r);
    (void)pthread_mutex_unlock(&a->lock);
    answer(rd, &r, file);
}

void ckpt_ahead_note_tensor(struct ckpt_reading *rd, const struct ckpt_vtree *tree, size_t tensor,
                            uint64_t off, uint64_t end)
{
    struct ckpt_ahead *a = rd->ahead;
    const struct ckpt_vnode *file;
    uint64_t at;

    if (!a)
        return;
    ckpt_vtree_place(tree, tensor, &file, &at);
    if (!a->segment) {
        ckpt_ahead_note(rd, file, at + off, at + end);
        return;
    }
    if (off == end || pthread_mutex_trylock(&a->lock) != 0)
        return;
    const uint64_t listed = a->segment[tensor].off;
    struct request r = note(a, &a->tensors, listed + off, listed + end);
    if (file) {
        const struct request other = note(a, &a->files, file->at + at + off, file->at + at + end);
        if (a->files.jumps < a->tensors.jumps)
            r = other;
    }
    claim(&r);
    (void)pthread_mutex_unlock(&a->lock);
    answer(rd, &r, r.order == &a->files ? file : &a->listed);
}

enum ckpt_prepared ckpt_ahead_prepare(struct ckpt_reading *rd, const struct ckpt_vnode *file,
                                      uint64_t off, uint64_t end)
{
    enum ckpt_prepared result = CKPT_PREPARED_BEFORE;

    for (size_t i = ckpt_segment_at(file, off);
         result >= CKPT_PREPARED_BUSY && i < file->nsegment && file->segment[i].off < end; i++) {
        const struct ckpt_segment *s = &file->segment[i];
        const uint64_t lo = off > s->off ? off - s->off : 0;
        const uint64_t hi = ckpt_min_u64(s->len, end - s->off);
        if (lo >= hi || s->kind != CKPT_SEGMENT_TENSOR)
            continue;
        const size_t esize = ckpt_dtype_size(s->tensor->dtype);
        result =
            ckpt_prepared_both(result, ckpt_tensor_prepare(s->tensor, rd, (s->from + lo) / esize,
                                                           (s->from + hi + esize - 1) / esize));
    }
    return result;
}

void ckpt_ahead_all(struct ckpt_reading *rd, const struct ckpt_vtree *tree, size_t ntensor)
{
    struct ckpt_ahead *a = rd->ahead;
    const struct ckpt_vnode *file = NULL;
    uint64_t ignored;

    for (size_t i = 0; a && i < ntensor && !(file && file->at == 0); i++)
        ckpt_vtree_place(tree, i, &file, &ignored);
    if (!file || file->at)
        return;
    for (const struct ckpt_vnode *f = file; f; f = f->next)
        a->files.whole = f->at + f->size;
    if (!fetch_all(a, rd, file, 0, a->most, a->files.whole))
        return;
    (void)pthread_mutex_lock(&a->lock);
    a->files.stream[0] = (struct stream){
        .read_bytes = a->most / EAGER, .fetched_to = a->most, .tick = ++a->files.tick};
    (void)pthread_mutex_unlock(&a->lock);
}
