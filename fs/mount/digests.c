/* SPDX-License-Identifier: Apache-2.0 */
/* Making and remembering digests. */
#include "mount/digests.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/err.h"
#include "base/mem.h"

enum { CHUNK = 1 << 20 };

bool ckptfs_digest_get(struct ckptfs_digests *d, uint64_t ino, char ret[CKPTFS_DIGEST_TEXT])
{
    bool found = false;

    (void)pthread_mutex_lock(&d->lock);
    size_t n = d->n < CKPTFS_DIGESTS ? d->n : CKPTFS_DIGESTS;
    for (size_t i = 0; i < n && !found; i++)
        if (d->entry[i].ino == ino) {
            memcpy(ret, d->entry[i].text, CKPTFS_DIGEST_TEXT);
            found = true;
        }
    (void)pthread_mutex_unlock(&d->lock);
    return found;
}

static void put(struct ckptfs_digests *d, uint64_t ino, const char *text)
{
    (void)pthread_mutex_lock(&d->lock);
    struct ckptfs_digest *e = &d->entry[d->n++ % CKPTFS_DIGESTS];
    e->ino = ino;
    memcpy(e->text, text, CKPTFS_DIGEST_TEXT);
    (void)pthread_mutex_unlock(&d->lock);
}

static int hash_file(struct ckpt_view *view, const struct ckpt_node *file, unsigned char *buf,
                     XXH3_state_t *state, struct ckpt_err *err)
{
    uint64_t off = 0;
    size_t n;

    do {
        if (ckpt_node_pread(view, file, buf, CHUNK, off, &n, err) < 0)
            return -1;
        (void)XXH3_128bits_update(state, buf, n);
        off += n;
    } while (n == CHUNK);
    return 0;
}

int ckptfs_digest_make(struct ckptfs_digests *d, struct ckpt_view *view,
                       const struct ckpt_node *file, uint64_t ino, char ret[CKPTFS_DIGEST_TEXT],
                       struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) unsigned char *buf = malloc(CHUNK);
    XXH3_state_t *state = XXH3_createState();
    int rc;

    if (buf && state) {
        (void)XXH3_128bits_reset(state);
        rc = hash_file(view, file, buf, state, err);
    } else {
        rc = ckpt_nomem(err);
    }
    if (rc == 0) {
        XXH128_hash_t h = XXH3_128bits_digest(state);
        (void)snprintf(ret, CKPTFS_DIGEST_TEXT, "%016llx%016llx", (unsigned long long)h.high64,
                       (unsigned long long)h.low64);
        put(d, ino, ret);
    }
    (void)XXH3_freeState(state);
    return rc;
}
