/* SPDX-License-Identifier: Apache-2.0 */
/* The largest span goes to the part that has least, then the next one. */
#include "tool/export/spans.h"

#include <stdbool.h>
#include <stdlib.h>

#include "base/err.h"
#include "base/sort.h"

/* Every claim is a file in the work folder, which takes as long to make and to delete as one of the
 * export's own. No more than MOST_CLAIMS are made where all files are small; with more of them,
 * they take their time, with fewer, processes share small files less evenly. A file that shares a
 * claim has SMALL bytes at most. */
enum { MOST_CLAIMS = 1024, SMALL = 1 << 20 };

/* A span is written by one part as a whole: the units [unit, unit + n). */
struct span {
    uint64_t bytes;
    size_t unit, n;
};

/* The bytes that a part has so far. */
struct load {
    uint64_t bytes;
    uint32_t part;
};

static size_t units_of(uint64_t size, uint64_t cut)
{
    return size ? (size_t)((size - 1) / cut + 1) : 1;
}

size_t ckpt_spans_place(const struct ckpt_spans *s, const struct ckpt_items *items, size_t unit,
                        uint64_t *ret_from, uint64_t *ret_to)
{
    size_t lo = 0, hi = s->nitem;

    while (hi - lo > 1) {
        const size_t mid = lo + (hi - lo) / 2;
        if (s->first[mid] <= unit)
            lo = mid;
        else
            hi = mid;
    }
    const uint64_t size = items->item[lo].size, from = (unit - s->first[lo]) * s->cut;
    *ret_from = from;
    *ret_to = size - from < s->cut ? size : from + s->cut;
    return lo;
}

static int by_bytes(const void *a, const void *b)
{
    const struct span *x = a, *y = b;
    return x->bytes != y->bytes ? ckpt_u64_cmp(y->bytes, x->bytes) : ckpt_u64_cmp(x->unit, y->unit);
}

/* ---- the part that has least is the first one of a heap ---- */

static bool has_less(const struct load *a, const struct load *b)
{
    return a->bytes != b->bytes ? a->bytes < b->bytes : a->part < b->part;
}

static void sink(struct load *heap, size_t n)
{
    for (size_t at = 0, child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && has_less(&heap[child + 1], &heap[child]))
            child++;
        if (has_less(&heap[at], &heap[child]))
            return;
        const struct load moved = heap[at];
        heap[at] = heap[child];
        heap[child] = moved;
    }
}

/* ---- dividing ---- */

struct division {
    const struct ckpt_items *items;
    struct ckpt_spans *spans;
    uint32_t parts;
    struct span *file, *span; /* all files, the largest first; what is dealt out */
    size_t nfile;             /* files with one claim count as one */
    struct load *heap;
};

/* Deal out all files, the units of the `ncut` largest one by one. Does every part get at most 1.2
 * times the mean? */
static bool deal(struct division *d, size_t ncut)
{
    const struct ckpt_spans *s = d->spans;
    size_t n = 0;
    uint64_t most = 0;

    for (size_t i = 0; i < d->nfile; i++) {
        const struct span file = d->file[i];
        uint64_t left = file.bytes;
        if (i >= ncut) {
            d->span[n++] = file;
            continue;
        }
        for (size_t k = 0; k < file.n; k++) {
            const uint64_t bytes = left < s->cut ? left : s->cut;
            d->span[n++] = (struct span){bytes, file.unit + k, 1};
            left -= bytes;
        }
    }
    ckpt_sort(d->span, n, by_bytes);
    for (uint32_t p = 0; p < d->parts; p++)
        d->heap[p] = (struct load){0, p};
    for (size_t i = 0; i < n; i++) {
        for (size_t k = 0; k < d->span[i].n; k++)
            s->owner[d->span[i].unit + k] = d->heap->part;
        d->heap->bytes += d->span[i].bytes;
        if (d->heap->bytes > most)
            most = d->heap->bytes;
        sink(d->heap, d->parts);
    }
    return (double)most * d->parts <= 1.2 * (double)d->items->bytes;
}

/* Cut as few files as possible: double their number until it is enough, then search between. */
static void divide(struct division *d)
{
    size_t most = 0, enough = 1, few = 0;

    while (most < d->nfile && d->file[most].bytes > d->spans->cut)
        most++;
    if (deal(d, 0) || most == 0)
        return;
    while (enough < most && !deal(d, enough)) {
        few = enough;
        enough = 2 * enough < most ? 2 * enough : most;
    }
    while (enough - few > 1) {
        const size_t mid = few + (enough - few) / 2;
        if (deal(d, mid))
            enough = mid;
        else
            few = mid;
    }
    (void)deal(d, enough);
}

/* List the files, with those together that share a claim: as many neighbours as it takes to have
 * MOST_CLAIMS, if all of them together are no larger than a unit. */
static void list_files(struct division *d)
{
    struct ckpt_spans *s = d->spans;
    const size_t together = s->nitem / MOST_CLAIMS + 1;
    size_t in_last = 0; /* small files in the last span */

    for (size_t i = 0; i < s->nitem; i++) {
        const uint64_t bytes = d->items->item[i].size;
        const size_t n = units_of(bytes, s->cut);
        const bool small = bytes <= SMALL && n == 1;
        struct span *last = d->nfile ? &d->file[d->nfile - 1] : NULL;
        s->first[i + 1] = s->first[i] + n;
        if (small && in_last && in_last < together && last->bytes + bytes <= s->cut) {
            last->bytes += bytes;
            last->n += n;
            in_last++;
        } else {
            last = &d->file[d->nfile++];
            *last = (struct span){bytes, s->first[i], n};
            in_last = small;
        }
        for (size_t u = s->first[i]; u < s->first[i + 1]; u++)
            s->claim[u] = in_last ? last->unit : u;
    }
}

int ckpt_spans_divide(const struct ckpt_items *items, uint64_t cut, uint32_t parts,
                      struct ckpt_spans *ret, struct ckpt_err *err)
{
    struct division d = {.items = items, .spans = ret, .parts = parts};
    int rc = -1;

    *ret = (struct ckpt_spans){.cut = cut, .nitem = items->n};
    for (size_t i = 0; i < items->n; i++)
        ret->n += units_of(items->item[i].size, cut);
    ret->first = calloc(items->n + 1, sizeof *ret->first);
    ret->claim = calloc(ret->n + 1, sizeof *ret->claim);
    ret->owner = calloc(ret->n + 1, sizeof *ret->owner);
    d.file = calloc(items->n + 1, sizeof *d.file);
    d.span = calloc(ret->n + 1, sizeof *d.span);
    d.heap = calloc(parts, sizeof *d.heap);
    if (ret->first && ret->claim && ret->owner && d.file && d.span && d.heap) {
        list_files(&d);
        ckpt_sort(d.file, d.nfile, by_bytes);
        divide(&d);
        rc = 0;
    }
    free(d.file);
    free(d.span);
    free(d.heap);
    return rc == 0 ? 0 : ckpt_nomem(err);
}

void ckpt_spans_release(struct ckpt_spans *s)
{
    free(s->first);
    free(s->claim);
    free(s->owner);
    *s = (struct ckpt_spans){0};
}
