/* SPDX-License-Identifier: Apache-2.0 */
/* Streams: reads that follow each other, from threads that are not quite in order, where the files
 * lie one after the other (ckpt_vnode.at). */
#include "view/ahead.h"

#include <pthread.h>
#include <stdlib.h>

#include "base/ckd.h"
#include "tensor/strided.h"

/* A stream is read ahead EAGER times as far as it was read, and all together AHEAD. */
enum {
    NSTREAM = 64,
    NEAR = 16 << 20,
    LEAST = 1 << 20, /* bytes read before that */
    EAGER = 8,
    AHEAD = 256 << 20,
    RECENT = 512, /* reads, since which a stream counts as being read */
};

struct stream {
    uint64_t first, next, got; /* got: bytes that were read */
    uint64_t tick;             /* of its last read; 0: it is none */
    uint64_t told;             /* what is before this is being fetched */
    uint64_t again;            /* there was no room: not before a read is here */
};

struct ckpt_ahead {
    pthread_mutex_t lock;
    uint64_t tick;
    struct stream stream[NSTREAM];
};

int ckpt_ahead_new(const struct ckpt_catalog *cat, struct ckpt_ahead **ret, struct ckpt_err *err)
{
    bool far = false;

    *ret = NULL;
    for (size_t i = 0; i < cat->sources.len && !far; i++)
        far = ckpt_source_is_far(cat->sources.ptr[i]);
    if (far && !(*ret = calloc(1, sizeof **ret)))
        return ckpt_nomem(err);
    if (far)
        (void)pthread_mutex_init(&(*ret)->lock, NULL);
    return 0;
}

void ckpt_ahead_free(struct ckpt_ahead *a)
{
    if (a)
        (void)pthread_mutex_destroy(&a->lock);
    free(a);
}

/* Note a read: its stream, and in *ret_to up to where to read ahead of it; 0: not at all. */
static struct stream *note(struct ckpt_ahead *a, uint64_t off, uint64_t end, uint64_t *ret_to)
{
    struct stream *mine = NULL, *oldest = &a->stream[0];
    uint64_t active = 1;

    a->tick++;
    *ret_to = 0;
    for (size_t i = 0; i < NSTREAM; i++) {
        struct stream *s = &a->stream[i];
        if (s->tick && off + NEAR >= s->next && off <= s->next + NEAR)
            mine = s;
        else if (s->tick && s->tick + RECENT > a->tick)
            active++;
        if (s->tick < oldest->tick)
            oldest = s;
    }
    if (!mine)
        *(mine = oldest) = (struct stream){.first = off, .next = end};
    mine->tick = a->tick;
    mine->next = ckpt_max_u64(mine->next, end);
    mine->got += end - off;
    if (mine->first != off && mine->got >= LEAST && 2 * mine->got >= mine->next - mine->first) {
        const uint64_t far = ckpt_min_u64(EAGER * mine->got, AHEAD / active);
        mine->told = ckpt_max_u64(mine->told, end);
        if (end >= mine->again && mine->told < mine->next + far - far / 4) /* not at each read */
            *ret_to = mine->next + far;
    }
    return mine;
}

/* What is read for bytes [off, end) of the file. */
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
            rc = ckpt_tensor_soon(s->tensor, rd, (s->from + lo) / esize,
                                  (s->from + hi + esize - 1) / esize, batch, NULL);
        }
    }
    return rc;
}

/* Begin to fetch bytes [off, end), which are in this file and the ones after it; false: not all of
 * it. */
static bool fetch(const struct ckpt_reading *rd, const struct ckpt_vnode *file, uint64_t off,
                  uint64_t end)
{
    struct ckpt_batch batch;
    int rc = 0;

    ckpt_batch_init(&batch);
    batch.soon = true;
    for (; rc == 0 && file && file->at < end; file = file->next)
        if (off < file->at + file->size)
            rc = add(&batch, rd, file, off > file->at ? off - file->at : 0,
                     ckpt_min_u64(end - file->at, file->size));
    const bool good = rc == 0 && ckpt_batch_fetch(&batch, CKPT_STRIDED_GAP);
    ckpt_batch_release(&batch);
    return good;
}

void ckpt_ahead_note(struct ckpt_reading *rd, const struct ckpt_vnode *file, uint64_t off,
                     uint64_t end)
{
    struct ckpt_ahead *a = rd->ahead;
    uint64_t to, from;

    if (!a || off == end)
        return;
    off += file->at;
    end += file->at;
    if (pthread_mutex_trylock(&a->lock) != 0) /* of no great use, and never a reason to wait */
        return;
    struct stream *s = note(a, off, end, &to);
    from = s->told;
    if (to > from)
        s->told = to;
    (void)pthread_mutex_unlock(&a->lock);
    if (to <= from || fetch(rd, file, from, to))
        return;
    (void)pthread_mutex_lock(&a->lock);
    if (s->told == to) { /* again, a little later */
        s->told = from;
        s->again = end + (to - end) / 16;
    }
    (void)pthread_mutex_unlock(&a->lock);
}

void ckpt_ahead_note_tensor(struct ckpt_reading *rd, const struct ckpt_vtree *tree, size_t tensor,
                            uint64_t off, uint64_t end)
{
    const struct ckpt_vnode *file;
    uint64_t at;

    ckpt_vtree_place(tree, tensor, &file, &at);
    if (file)
        ckpt_ahead_note(rd, file, at + off, at + end);
}

void ckpt_ahead_all(struct ckpt_reading *rd, const struct ckpt_vtree *tree, size_t ntensor)
{
    struct ckpt_ahead *a = rd->ahead;
    const struct ckpt_vnode *file = NULL;
    uint64_t ignored;

    for (size_t i = 0; a && i < ntensor && !(file && file->at == 0); i++)
        ckpt_vtree_place(tree, i, &file, &ignored);
    if (!file || file->at || !fetch(rd, file, 0, AHEAD))
        return;
    (void)pthread_mutex_lock(&a->lock);
    a->stream[0] = (struct stream){.got = AHEAD / EAGER, .told = AHEAD, .tick = ++a->tick};
    (void)pthread_mutex_unlock(&a->lock);
}
