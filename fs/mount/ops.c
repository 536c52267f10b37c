/* SPDX-License-Identifier: Apache-2.0 */
/* FUSE's operations: they find the node of an inode number and reply with the result. */
#include "mount/mount.h"

#include <errno.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/mem.h"
#include "mount/reply.h"
#include "mount/tree.h"

enum { MOST_BACKGROUND = 1024 };

#define SOURCE_XATTR "user.ckptfs.source"

static struct ckptfs *fs_of(fuse_req_t req) { return fuse_req_userdata(req); }

/* The node of a request. The kernel only names inodes that it holds; any other number would be a
 * bug of the kernel or a forged handle over NFS. */
static const struct ckptfs_node *node_of(fuse_req_t req, fuse_ino_t ino)
{
    const struct ckptfs_node *n = ckptfs_nodes_get(&fs_of(req)->nodes, ino);

    if (!n)
        (void)fuse_reply_err(req, ESTALE);
    return n;
}

static void add(_Atomic uint64_t *counter, uint64_t n)
{
    (void)atomic_fetch_add_explicit(counter, n, memory_order_relaxed);
}

/* A request that is answered while it has its turn, if it may wait for storage, and holds the view
 * that it is about. Zeroed: it has neither. */
struct entrance {
    struct ckptfs_turn turn;
    struct ckpt_view *view; /* NULL: it has a turn, or needs no view */
    bool has_turn;
    struct ckptfs *fs; /* with a handle */
    /* The file that is read, or NULL: if the request is answered in this thread's place
     * (watchdog.h), the kernel may release it meanwhile. */
    struct ckptfs_handle *handle;
};

/* Take the turn of a request that waits. False: it was answered with an error. */
static bool take_turn(fuse_req_t req, const struct ckptfs_lanes *lanes, struct entrance *ret)
{
    const int error = ckptfs_admit(&fs_of(req)->admission, &ret->turn, lanes, req);

    ret->has_turn = !error;
    if (error)
        (void)fuse_reply_err(req, error);
    return !error;
}

/* Begin a request about the node of an inode number: it opens the node's view in its turn, or holds
 * the view that is open. NULL: it was answered with an error. */
static const struct ckptfs_node *begin(fuse_req_t req, fuse_ino_t ino, struct entrance *ret)
{
    const struct ckptfs_node *n = node_of(req, ino);
    struct ckptfs_lanes lanes;

    if (n && ckptfs_tree_waits(fs_of(req), n, &ret->view, &lanes) && !take_turn(req, &lanes, ret))
        return NULL;
    return n;
}

/* Is the answer to the request this thread's? If not, the request may be gone. */
static bool claim(struct entrance *e) { return !e->has_turn || ckptfs_turn_claim(&e->turn); }

static void reply_err(struct entrance *e, fuse_req_t req, int error)
{
    if (claim(e))
        (void)fuse_reply_err(req, error);
}

static void end(struct entrance *e)
{
    if (e->has_turn)
        ckptfs_leave(&e->turn);
    if (e->handle)
        ckptfs_handle_close(e->fs, e->handle);
    ckpt_view_release(e->view);
}

/* ---- the session ---- */

static void op_init(void *userdata, struct fuse_conn_info *conn)
{
    struct ckptfs *fs = userdata;
    struct ckptfs_negotiated *n = &fs->negotiated;

    /* Splicing needs four times the daemon's CPU time here, and nothing is ever written. */
    conn->want &= ~(unsigned)(FUSE_CAP_SPLICE_READ | FUSE_CAP_SPLICE_WRITE | FUSE_CAP_SPLICE_MOVE |
                              FUSE_CAP_WRITEBACK_CACHE);
    conn->want |= conn->capable & (FUSE_CAP_ASYNC_READ | FUSE_CAP_ASYNC_DIO | FUSE_CAP_READDIRPLUS |
                                   FUSE_CAP_READDIRPLUS_AUTO | FUSE_CAP_PARALLEL_DIROPS);
#ifdef FUSE_CAP_CACHE_SYMLINKS
    conn->want |=
        conn->capable & FUSE_CAP_CACHE_SYMLINKS; /* a link with another target has another inode */
#endif
#ifdef FUSE_CAP_AUTO_INVAL_DATA
    conn->want &= ~(unsigned)FUSE_CAP_AUTO_INVAL_DATA; /* an inode's bytes never change */
#endif
#ifdef FUSE_CAP_DIRECT_IO_ALLOW_MMAP
    if (fs->config->direct && (conn->capable & FUSE_CAP_DIRECT_IO_ALLOW_MMAP)) {
        conn->want |= FUSE_CAP_DIRECT_IO_ALLOW_MMAP;
        n->direct_mmap = true;
    }
#endif
    /* To the kernel, read-ahead and direct reads are "background" requests. It delays all of them,
     * of every file, while this many (default: 12) are unanswered, so one hung file would stop the
     * others. We admit them ourselves (admission.h). */
    conn->max_background = MOST_BACKGROUND;
    conn->congestion_threshold = MOST_BACKGROUND / 4 * 3;
    conn->max_read = CKPTFS_MAX_READ;
    conn->max_write = CKPTFS_MAX_READ; /* the kernel derives the size of requests from this */
    n->proto_major = conn->proto_major;
    n->proto_minor = conn->proto_minor;
    n->max_read = conn->max_read;
}

static void op_statfs(fuse_req_t req, fuse_ino_t ino)
{
    struct ckptfs *fs = fs_of(req);
    const unsigned long bsize = 4096;
    struct statvfs st = {
        .f_bsize = bsize,
        .f_frsize = bsize,
        .f_blocks = (fsblkcnt_t)((atomic_load(&fs->refresh.bytes) + bsize - 1) / bsize),
        .f_files = (fsfilcnt_t)ckptfs_nodes_count(&fs->nodes) + 1,
        .f_namemax = 255,
    };

    (void)ino;
    (void)fuse_reply_statfs(req, &st);
}

/* ---- names ---- */

static int entry_of(struct ckptfs *fs, const struct ckptfs_found *found,
                    struct fuse_entry_param *ret)
{
    const struct ckptfs_node *n = ckptfs_nodes_ref(&fs->nodes, &found->id);

    if (!n)
        return ENOMEM;
    *ret = (struct fuse_entry_param){.ino = n->ino,
                                     .attr_timeout = ckptfs_attr_timeout(n->id.kind),
                                     .entry_timeout = ckptfs_name_timeout(found->lasting)};
    ckptfs_stat_of(fs, &n->id, n->ino, &ret->attr);
    return 0;
}

static void op_lookup(fuse_req_t req, fuse_ino_t parent, const char *name)
{
    struct ckptfs *fs = fs_of(req);
    ckpt_cleanup(end) struct entrance entrance = {0};
    const struct ckptfs_node *dir = begin(req, parent, &entrance);
    struct ckptfs_found found;
    struct fuse_entry_param e;

    add(&fs->count.lookups, 1);
    if (!dir)
        return;
    int rc = ckptfs_tree_lookup(fs, dir, name, &found);
    if (!rc)
        rc = entry_of(fs, &found, &e);
    if (rc == ENOENT && found.lasting) /* an inode number of 0 lets the kernel cache the absence */
        e = (struct fuse_entry_param){.entry_timeout = ckptfs_name_timeout(true)};
    else if (rc) {
        reply_err(&entrance, req, rc);
        return;
    }
    if ((!claim(&entrance) || fuse_reply_entry(req, &e) < 0) && e.ino)
        ckptfs_nodes_forget(&fs->nodes, e.ino, 1);
}

static void op_forget(fuse_req_t req, fuse_ino_t ino, uint64_t n)
{
    ckptfs_nodes_forget(&fs_of(req)->nodes, ino, n);
    fuse_reply_none(req);
}

static void op_forget_multi(fuse_req_t req, size_t count, struct fuse_forget_data *forgets)
{
    for (size_t i = 0; i < count; i++)
        ckptfs_nodes_forget(&fs_of(req)->nodes, forgets[i].ino, forgets[i].nlookup);
    fuse_reply_none(req);
}

static void op_getattr(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    const struct ckptfs_node *n = node_of(req, ino);
    struct ckptfs *fs = fs_of(req);
    struct ckptfs_id id;
    struct stat st;

    (void)fi;
    if (!n)
        return;
    id = n->id;
    if (id.kind == CKPTFS_ROOT)
        id.mtime_ns = ckptfs_root_mtime(fs);
    ckptfs_stat_of(fs, &id, n->ino, &st);
    (void)fuse_reply_attr(req, &st, ckptfs_attr_timeout(id.kind));
}

static void op_readlink(fuse_req_t req, fuse_ino_t ino)
{
    const struct ckptfs_node *n = node_of(req, ino);

    if (!n)
        return;
    if (n->id.kind == CKPTFS_LINK)
        (void)fuse_reply_readlink(req, n->id.path);
    else
        (void)fuse_reply_err(req, EINVAL);
}

/* ---- files ---- */

/* The open file or listing of a request. */
static void *handle_of(const struct fuse_file_info *fi) { return (void *)(uintptr_t)fi->fh; }

static void op_open(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    struct ckptfs *fs = fs_of(req);
    ckpt_cleanup(end) struct entrance e = {0};
    const struct ckptfs_node *n = begin(req, ino, &e);
    struct ckptfs_file *f;

    if (!n)
        return;
    int rc = ckptfs_file_open(fs, n, &f);
    if (rc) {
        reply_err(&e, req, rc);
        return;
    }
    fi->fh = (uintptr_t)f;
    fi->keep_cache = !ckptfs_file_uncached(f);
    fi->direct_io = ckptfs_file_uncached(f) ||
                    (fs->config->direct && (fs->negotiated.direct_mmap || (fi->flags & O_DIRECT)));
#if FUSE_VERSION >= FUSE_MAKE_VERSION(3, 11)
    fi->noflush = 1; /* nothing is ever written, so close need not send a request */
#endif
    add(&fs->count.opens, 1);
    add(&fs->count.open_files, 1);
    /* if it was interrupted, the kernel will not release the file */
    if (!claim(&e) || fuse_reply_open(req, fi) < 0) {
        add(&fs->count.open_files, (uint64_t)-1);
        ckptfs_handle_close(fs, (struct ckptfs_handle *)f);
    }
}

static void op_release(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    (void)ino;
    add(&fs_of(req)->count.open_files, (uint64_t)-1);
    ckptfs_handle_close(fs_of(req), handle_of(fi));
    (void)fuse_reply_err(req, 0);
}

/* A buffer for a reply of this size. NULL: there is no memory. */
static struct ckptfs_buffer *buffer_of(struct ckptfs *fs, size_t size)
{
    return size <= CKPTFS_MAX_READ ? ckptfs_buffer_get(&fs->buffers) : NULL;
}

static void op_read(fuse_req_t req, fuse_ino_t ino, size_t size, off_t off,
                    struct fuse_file_info *fi)
{
    struct ckptfs *fs = fs_of(req); /* a reply frees req */
    struct ckptfs_file *f = handle_of(fi);
    ckpt_cleanup(end) struct entrance e = {0};
    struct ckptfs_buffer *buffer;
    struct ckptfs_lanes lanes;
    size_t len;

    (void)ino;
    e.fs = fs;
    e.handle = ckptfs_handle_hold(handle_of(fi));
    if (ckptfs_file_waits(f, &lanes) && !take_turn(req, &lanes, &e))
        return;
    if (!(buffer = buffer_of(fs, size))) {
        reply_err(&e, req, ENOMEM);
        return;
    }
    int rc = ckptfs_file_read(fs, f, buffer->mem, size, (uint64_t)off, &len);
    if (rc) {
        reply_err(&e, req, rc);
    } else if (claim(&e)) {
        add(&fs->count.reads, 1);
        add(&fs->count.read_bytes, len);
        (void)fuse_reply_buf(req, buffer->mem, len);
    }
    ckptfs_buffer_put(&fs->buffers, buffer);
}

/* ---- directories ---- */

static void op_opendir(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    struct ckptfs *fs = fs_of(req);
    ckpt_cleanup(end) struct entrance e = {0};
    const struct ckptfs_node *n = begin(req, ino, &e);
    struct ckptfs_listing *l;

    if (!n)
        return;
    int rc = ckptfs_listing_open(fs, n, &l);
    if (rc) {
        reply_err(&e, req, rc);
        return;
    }
    fi->fh = (uintptr_t)l;
    fi->keep_cache = fi->cache_readdir = ckptfs_listing_lasting(l);
    if (!claim(&e) || fuse_reply_open(req, fi) < 0)
        ckptfs_handle_close(fs, (struct ckptfs_handle *)l);
}

static void op_releasedir(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    (void)ino;
    ckptfs_handle_close(fs_of(req), handle_of(fi));
    (void)fuse_reply_err(req, 0);
}

/* Append entry `pos` of a listing (0 and 1 are "." and "..") to buf. Returns the bytes that it
 * takes, which is more than `room` if it did not fit; 0: the entry cannot be shown. */
static size_t put_entry(fuse_req_t req, const struct ckptfs_listing *l, size_t pos, bool plus,
                        char *buf, size_t room)
{
    struct ckptfs *fs = fs_of(req);
    struct fuse_entry_param e = {.attr.st_mode = S_IFDIR, .attr.st_ino = FUSE_ROOT_ID};
    const char *name = pos == 0 ? "." : pos == 1 ? ".." : ckptfs_listing_name(l, pos - 2);
    struct ckptfs_found found;
    size_t need;

    if (pos >= 2) {
        if (ckptfs_listing_find(l, pos - 2, &found))
            return 0;
        if (plus && entry_of(fs, &found, &e))
            return 0;
        if (!plus) {
            e.attr.st_ino = ckptfs_ino(&found.id);
            e.attr.st_mode = ckptfs_type_of(found.id.kind);
        }
    }
    need = plus ? fuse_add_direntry_plus(req, buf, room, name, &e, (off_t)pos + 1)
                : fuse_add_direntry(req, buf, room, name, &e.attr, (off_t)pos + 1);
    if (need > room && plus && pos >= 2)
        ckptfs_nodes_forget(&fs->nodes, e.ino, 1);
    return need;
}

static void list(fuse_req_t req, size_t size, off_t off, struct fuse_file_info *fi, bool plus)
{
    struct ckptfs *fs = fs_of(req); /* a reply frees req */
    struct ckptfs_listing *l = handle_of(fi);
    struct ckptfs_buffer *buffer = buffer_of(fs, size);
    size_t used = 0;

    if (!buffer) {
        (void)fuse_reply_err(req, ENOMEM);
        return;
    }
    char *buf = buffer->mem;
    for (size_t pos = (size_t)off, n = ckptfs_listing_count(l) + 2; pos < n; pos++) {
        size_t need = put_entry(req, l, pos, plus, buf + used, size - used);
        if (need > size - used)
            break;
        used += need;
    }
    (void)fuse_reply_buf(req, buf, used);
    ckptfs_buffer_put(&fs->buffers, buffer);
}

static void op_readdir(fuse_req_t req, fuse_ino_t ino, size_t size, off_t off,
                       struct fuse_file_info *fi)
{
    (void)ino;
    list(req, size, off, fi, false);
}

static void op_readdirplus(fuse_req_t req, fuse_ino_t ino, size_t size, off_t off,
                           struct fuse_file_info *fi)
{
    (void)ino;
    list(req, size, off, fi, true);
}

/* ---- extended attributes ---- */

/* Reply with an attribute's value or with the list of attributes; with their length only, if the
 * caller asked with size 0. */
static void reply_attribute(fuse_req_t req, const char *value, size_t len, size_t size)
{
    if (size == 0)
        (void)fuse_reply_xattr(req, len);
    else if (len > size)
        (void)fuse_reply_err(req, ERANGE);
    else
        (void)fuse_reply_buf(req, value, len);
}

static void op_getxattr(fuse_req_t req, fuse_ino_t ino, const char *name, size_t size)
{
    ckpt_cleanup(end) struct entrance e = {0};
    ckpt_cleanup(ckpt_freep) char *value = NULL;
    /* tools ask every file for other attributes: do not open its view for them */
    const bool is_source = strcmp(name, SOURCE_XATTR) == 0;
    const struct ckptfs_node *n = is_source ? begin(req, ino, &e) : node_of(req, ino);

    if (!n)
        return;
    int rc = is_source ? ckptfs_tree_source(fs_of(req), n, &value) : ENODATA;
    if (rc)
        reply_err(&e, req, rc);
    else if (claim(&e))
        reply_attribute(req, value, strlen(value), size);
}

/* Does not open a view, so the list is the same for a step that cannot be read. */
static void op_listxattr(fuse_req_t req, fuse_ino_t ino, size_t size)
{
    const struct ckptfs_node *n = node_of(req, ino);

    if (!n)
        return;
    bool has = n->id.kind == CKPTFS_STEP || n->id.kind == CKPTFS_DIR || n->id.kind == CKPTFS_FILE;
    reply_attribute(req, SOURCE_XATTR, has ? sizeof SOURCE_XATTR : 0, size);
}

/* Nothing here refuses changes: the mount is read-only, so the kernel answers EROFS itself. */
const struct fuse_lowlevel_ops ckptfs_ops = {
    .init = op_init,
    .statfs = op_statfs,
    .lookup = op_lookup,
    .forget = op_forget,
    .forget_multi = op_forget_multi,
    .getattr = op_getattr,
    .readlink = op_readlink,
    .open = op_open,
    .read = op_read,
    .release = op_release,
    .opendir = op_opendir,
    .readdir = op_readdir,
    .readdirplus = op_readdirplus,
    .releasedir = op_releasedir,
    .getxattr = op_getxattr,
    .listxattr = op_listxattr,
};
