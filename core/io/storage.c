/* SPDX-License-Identifier: Apache-2.0 */
/* Filesystems are told apart by their device numbers. */
#include "io/storage.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/vfs.h>

#include "base/clock.h"
#include "base/str.h"

enum {
    SAMPLES = 4,             /* reads that decide whether a filesystem answers at once */
    AT_ONCE_NS = 200 * 1000, /* it does if the slowest of them took less */
};

struct ckpt_storage {
    struct ckpt_storage *next;
    uint64_t device;
    const struct kind *kind;              /* of a shared one; else NULL */
    atomic_uint samples, slow;            /* reads that were told of, and those that took long */
    atomic_ullong began, ended;           /* reads of large parts */
    atomic_ullong answered_ms, latest_ms; /* its last answer; the latest request with an answer */
    atomic_bool no_direct;
    atomic_ullong rate[2]; /* bytes a second of one that was alone; [1]: with O_DIRECT. 0: none */
};

/* linux/magic.h, and theirs. virtiofs has the type of FUSE. */
static const struct kind {
    long type;
    const char *name;
    bool ignores_case;
} kinds[] = {
    {0x6969, "NFS", false},       {0x517b, "SMB", true},         {0xfe534d42, "SMB2", true},
    {0xff534d42, "CIFS", true},   {0x0bd00bd0, "Lustre", false}, {0x00c36400, "Ceph", false},
    {0x47504653, "GPFS", false},  {0x19830326, "BeeGFS", false}, {0x65735546, "FUSE", false},
    {0x01021997, "9P", false},    {0x5346414f, "AFS", false},    {0xaad7aaea, "PanFS", false},
    {0x786f4256, "vboxsf", true},
};

static struct ckpt_storage *all; /* only ever longer */
static pthread_mutex_t all_lock = PTHREAD_MUTEX_INITIALIZER;

static const struct kind *kind_of(long type)
{
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (kinds[i].type == type)
            return &kinds[i];
    return NULL;
}

static struct ckpt_storage *find(uint64_t device)
{
    for (struct ckpt_storage *s = all; s; s = s->next)
        if (s->device == device)
            return s;
    return NULL;
}

struct ckpt_storage *ckpt_storage_of(int fd, uint64_t device)
{
    struct ckpt_storage *s = NULL;
    struct statfs fs;

    (void)pthread_mutex_lock(&all_lock);
    s = find(device);
    (void)pthread_mutex_unlock(&all_lock);
    if (s || fstatfs(fd, &fs) < 0)
        return s;
    (void)pthread_mutex_lock(&all_lock);
    if (!(s = find(device)) && (s = calloc(1, sizeof *s))) {
        s->device = device;
        s->kind = kind_of((long)fs.f_type);
        s->next = all;
        all = s;
    }
    (void)pthread_mutex_unlock(&all_lock);
    return s;
}

bool ckpt_storage_is_shared(const struct ckpt_storage *s) { return s && s->kind; }

bool ckpt_storage_ignores_case(const struct ckpt_storage *s)
{
    return s && s->kind && s->kind->ignores_case;
}

bool ckpt_storage_is_undecided(const struct ckpt_storage *s)
{
    return s && s->kind && atomic_load(&s->samples) < SAMPLES;
}

/* Have all samples been answered at once? */
static bool is_quick(const struct ckpt_storage *s)
{
    return atomic_load(&s->samples) >= SAMPLES && atomic_load(&s->slow) == 0;
}

bool ckpt_storage_is_far(const struct ckpt_storage *s, enum ckpt_far_rule rule)
{
    if (!s || rule == CKPT_FAR_NEVER)
        return false;
    return rule == CKPT_FAR_ALWAYS || (s->kind && !is_quick(s));
}

bool ckpt_storage_may_hang(const struct ckpt_storage *s, enum ckpt_far_rule rule)
{
    return s && rule != CKPT_FAR_NEVER && (rule == CKPT_FAR_ALWAYS || s->kind);
}

void ckpt_storage_heard(struct ckpt_storage *s, uint64_t begun_ms)
{
    if (!s)
        return;
    atomic_store(&s->answered_ms, ckpt_now_ms());
    unsigned long long before = atomic_load(&s->latest_ms);
    while (before < begun_ms && !atomic_compare_exchange_weak(&s->latest_ms, &before, begun_ms))
        ;
}

bool ckpt_storage_is_silent(const struct ckpt_storage *s, uint32_t for_ms)
{
    return !s || ckpt_now_ms() >= atomic_load(&s->answered_ms) + for_ms;
}

bool ckpt_storage_hangs(const struct ckpt_storage *s, uint64_t begun_ms, uint32_t timeout_ms)
{
    return ckpt_now_ms() >= begun_ms + timeout_ms &&
           (ckpt_storage_is_silent(s, timeout_ms) ||
            atomic_load(&s->latest_ms) >= begun_ms + timeout_ms);
}

void ckpt_storage_answered(struct ckpt_storage *s, uint64_t ns)
{
    if (ns >= AT_ONCE_NS)
        atomic_fetch_add(&s->slow, 1);
    atomic_fetch_add(&s->samples, 1);
}

struct ckpt_storage_read ckpt_storage_read_begins(struct ckpt_storage *s)
{
    struct ckpt_storage_read r = {.was_alone = atomic_load(&s->began) == atomic_load(&s->ended)};

    r.began = atomic_fetch_add(&s->began, 1) + 1;
    r.direct = !atomic_load(&s->no_direct) &&
               !(r.was_alone && atomic_load(&s->rate[1]) && !atomic_load(&s->rate[0]));
    r.begin_ns = ckpt_now_ns();
    return r;
}

void ckpt_storage_read_ends(struct ckpt_storage *s, const struct ckpt_storage_read *r, uint64_t len)
{
    const uint64_t ns = ckpt_now_ns() - r->begin_ns + 1;

    if (r->was_alone && atomic_load(&s->began) == r->began && !atomic_load(&s->rate[r->direct]))
        atomic_store(&s->rate[r->direct], len * 1000000000 / ns + 1);
    atomic_fetch_add(&s->ended, 1);
    const uint64_t buffered = atomic_load(&s->rate[0]), direct = atomic_load(&s->rate[1]);
    if (buffered && direct && direct < buffered - buffered / 4) /* not for a small difference */
        atomic_store(&s->no_direct, true);
}

void ckpt_storage_refused_direct(struct ckpt_storage *s) { atomic_store(&s->no_direct, true); }

char *ckpt_storage_describe(const struct ckpt_storage *s, enum ckpt_far_rule rule)
{
    const char *kind = s && s->kind ? s->kind->name : "a local filesystem";

    if (!s || (rule == CKPT_FAR_AUTO && !s->kind))
        return ckpt_asprintf("%s: near", kind);
    if (rule != CKPT_FAR_AUTO)
        return ckpt_asprintf("%s: %s, by the option far=", kind,
                             rule == CKPT_FAR_ALWAYS ? "far" : "near");
    return is_quick(s) ? ckpt_asprintf("%s: near, as it answers at once", kind)
                       : ckpt_asprintf("%s: far, by its type", kind);
}
