/* SPDX-License-Identifier: Apache-2.0 */
/* Making and remembering digests. */
#include "digests.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/mem.h"
#include "mount.h"
#include "tree.h"

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

static int hash_file(struct ckptfs *fs, struct ckptfs_file *f, unsigned char *buf,
                     XXH3_state_t *state)
{
    uint64_t off = 0;
    size_t n;

    do {
        int rc = ckptfs_file_read(fs, f, buf, CHUNK, off, &n);
        if (rc)
            return rc;
        (void)XXH3_128bits_update(state, buf, n);
        off += n;
    } while (n == CHUNK);
    return 0;
}

int ckptfs_digest_make(struct ckptfs *fs, const struct ckptfs_node *file,
                       char ret[CKPTFS_DIGEST_TEXT])
{
    ckpt_cleanup(ckpt_freep) unsigned char *buf = malloc(CHUNK);
    XXH3_state_t *state = XXH3_createState();
    struct ckptfs_file *f = NULL;
    int rc = buf && state ? ckptfs_file_open(fs, file, &f) : ENOMEM;

    if (rc == 0) {
        (void)XXH3_128bits_reset(state);
        rc = hash_file(fs, f, buf, state);
        ckptfs_file_close(fs, f);
    }
    if (rc == 0) {
        XXH128_hash_t h = XXH3_128bits_digest(state);
        (void)snprintf(ret, CKPTFS_DIGEST_TEXT, "%016llx%016llx", (unsigned long long)h.high64,
                       (unsigned long long)h.low64);
        put(&fs->digests, file->ino, ret);
    }
    (void)XXH3_freeState(state);
    return rc;
}
