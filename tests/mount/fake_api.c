/* SPDX-License-Identifier: Apache-2.0 */
/* A libckptfs of made-up files, for tests of the mount that need faults and delays on demand.
 *
 * A checkpoint is a directory with a file `files`, lines of "name bytes" ("sub/name" too); a run is
 * one, or a folder of them. Byte i of every file is (131 i + 17 (i >> 8) + length of its name) mod
 * 256. Further files beside it: error    the step can't be read; the first line is the reason
 *     open_ms  opening the view takes so long
 *     read_ms  so does each read
 *     fault    "offset": reads that cover it fail
 * They are looked at when the view is opened, read_ms and fault at each read. */
#include <ckptfs/ckptfs.h>

#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { LONGEST = 3 * PATH_MAX };

struct ckpt_options {
    uint32_t timeout_s; /* 0: a default */
};

struct ckpt_node {
    char name[NAME_MAX + 1];
    bool dir;
    uint64_t size;
    int64_t mtime_ns;
    struct ckpt_node *child[64];
    size_t nchild;
};

struct ckpt_view {
    atomic_uint nref;
    char path[LONGEST];
    uint64_t generation;
    struct ckpt_node root;
};

struct ckpt_run {
    pthread_mutex_t lock;
    char path[PATH_MAX];
    bool folder;
    struct ckpt_step *step;
    size_t nstep;
    _Atomic uint64_t requests, bytes, errors;
};

static int fail(struct ckpt_err *err, enum ckpt_code code, const char *text, const char *what)
{
    if (err && !err->code) {
        err->code = code;
        (void)snprintf(err->text, sizeof err->text, "%s%s", text, what);
    }
    return -1;
}

/* The first line of DIR/NAME, or NULL if there is no such file. */
static const char *side_file(const char *dir, const char *name, char buf[256])
{
    char path[LONGEST];

    (void)snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *in = fopen(path, "re");
    if (!in)
        return NULL;
    buf[0] = '\0';
    if (!fgets(buf, 256, in))
        buf[0] = '\0';
    buf[strcspn(buf, "\n")] = '\0';
    (void)fclose(in);
    return buf;
}

static void delay(const char *dir, const char *name)
{
    char buf[256];
    const char *ms = side_file(dir, name, buf);

    if (ms)
        (void)usleep((useconds_t)atoi(ms) * 1000);
}

const char *ckpt_version(void) { return "fake"; }

int ckpt_options_new(struct ckpt_options **ret, struct ckpt_err *err)
{
    *ret = calloc(1, sizeof **ret);
    return *ret ? 0 : fail(err, CKPT_NOMEM, "out of memory", "");
}

void ckpt_options_free(struct ckpt_options *opt) { free(opt); }

bool ckpt_options_knows(const char *key)
{
    return strcmp(key, "base") == 0 || strcmp(key, "dtype") == 0 || strcmp(key, "view") == 0 ||
           strcmp(key, "timeout") == 0;
}

uint32_t ckpt_options_timeout_ms(const struct ckpt_options *opt)
{
    return (opt->timeout_s ? opt->timeout_s : 120) * 1000;
}

const char *ckpt_options_word(size_t i, const char **ret_value, const char **ret_help)
{
    static const char *const word[] = {"base", "dtype", "view", "timeout"};

    *ret_value = "WORD";
    *ret_help = "made up";
    return i < 4 ? word[i] : NULL;
}

enum ckpt_option_topic ckpt_options_topic(size_t i)
{
    return i == 2 ? CKPT_TOPIC_FORMAT : CKPT_TOPIC_MODEL;
}

char *ckpt_options_meant(const char *word)
{
    return strcmp(word, "precision") == 0 ? strdup("dtype=WORD") : NULL;
}

int ckpt_options_set(struct ckpt_options *opt, const char *key, const char *value,
                     struct ckpt_err *err)
{
    if (strcmp(key, "timeout") == 0 && value)
        opt->timeout_s = (uint32_t)strtoul(value, NULL, 10);
    if (strcmp(key, "dtype") == 0 && (!value || strcmp(value, "bogus") == 0))
        return fail(err, CKPT_USAGE, "dtype: not understood: ", value ? value : "");
    return 0;
}

int ckpt_bucket_info(char **ret_json, struct ckpt_err *err)
{
    (void)err;
    *ret_json = NULL;
    return 0;
}

int ckpt_options_connect(struct ckpt_options *opt, const char *path, struct ckpt_err *err)
{
    (void)opt, (void)path, (void)err;
    return 0;
}

int ckpt_options_places(const struct ckpt_options *opt, const char *path,
                        int (*visit)(void *ctx, const char *place), void *ctx, struct ckpt_err *err)
{
    char parent[PATH_MAX];

    (void)opt, (void)err;
    (void)snprintf(parent, sizeof parent, "%.*s", (int)(strrchr(path, '/') - path), path);
    return visit(ctx, access(path, F_OK) == 0 ? path : parent) == 0 ? 0 : -1;
}

void ckpt_options_set_log(struct ckpt_options *opt,
                          void (*line)(void *, enum ckpt_log_severity, const char *), void *ctx)
{
    (void)opt, (void)line, (void)ctx;
}

/* Whether DIR has a file `files`; its generation and time. */
static bool is_step(const char *dir, struct ckpt_step *ret)
{
    char path[LONGEST];
    struct stat st;

    (void)snprintf(path, sizeof path, "%s/files", dir);
    if (stat(path, &st) < 0)
        return false;
    ret->mtime_ns = (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec;
    ret->generation = (uint64_t)ret->mtime_ns * 31 + (uint64_t)st.st_size;
    return true;
}

static int by_name(const void *a, const void *b)
{
    const struct ckpt_step *x = a, *y = b;
    long m = atol(x->name), n = atol(y->name);
    return m != n ? (m > n) - (m < n) : strcmp(x->name, y->name);
}

static size_t list(const char *path, bool folder, struct ckpt_step **ret)
{
    struct ckpt_step *step = calloc(1024, sizeof *step);
    size_t n = 0;

    if (!folder) {
        n = is_step(path, &step[0]);
        step[0].name = strdup("");
    } else {
        DIR *d = opendir(path);
        for (struct dirent *e; d && n < 1024 && (e = readdir(d));) {
            char sub[LONGEST];
            (void)snprintf(sub, sizeof sub, "%s/%s", path, e->d_name);
            if (e->d_name[0] != '.' && is_step(sub, &step[n]))
                step[n++].name = strdup(e->d_name);
        }
        if (d)
            (void)closedir(d);
        qsort(step, n, sizeof *step, by_name);
    }
    if (n)
        step[n - 1].is_latest = true;
    *ret = step;
    return n;
}

int ckpt_run_open(const char *path, const struct ckpt_options *opt, struct ckpt_run **ret,
                  struct ckpt_err *err)
{
    struct ckpt_run *r = calloc(1, sizeof *r);

    (void)opt;
    (void)pthread_mutex_init(&r->lock, NULL);
    (void)snprintf(r->path, sizeof r->path, "%s", path);
    r->folder = !is_step(path, &(struct ckpt_step){0});
    r->nstep = list(r->path, r->folder, &r->step);
    if (!r->nstep) {
        ckpt_run_close(r);
        return fail(err, CKPT_MISSING, path, ": neither a checkpoint nor a folder of them");
    }
    *ret = r;
    return 0;
}

void ckpt_run_close(struct ckpt_run *r)
{
    if (!r)
        return;
    ckpt_steps_free(r->step, r->nstep);
    (void)pthread_mutex_destroy(&r->lock);
    free(r);
}

bool ckpt_run_is_folder(const struct ckpt_run *r) { return r->folder; }

void ckpt_run_watch(struct ckpt_run *r) { (void)r; }

int ckpt_run_scan(struct ckpt_run *r, bool *ret_changed, struct ckpt_err *err)
{
    struct ckpt_step *step;
    size_t n = list(r->path, r->folder, &step);
    bool changed;

    (void)err;
    (void)pthread_mutex_lock(&r->lock);
    changed = n != r->nstep;
    for (size_t i = 0; !changed && i < n; i++)
        changed = strcmp(step[i].name, r->step[i].name) != 0 ||
                  step[i].generation != r->step[i].generation;
    struct ckpt_step *old = r->step;
    size_t nold = r->nstep;
    r->step = step;
    r->nstep = n;
    (void)pthread_mutex_unlock(&r->lock);
    ckpt_steps_free(old, nold);
    if (ret_changed)
        *ret_changed = changed;
    return 0;
}

int ckpt_run_steps(struct ckpt_run *r, struct ckpt_step **ret_steps, size_t *ret_n,
                   struct ckpt_err *err)
{
    (void)err;
    (void)pthread_mutex_lock(&r->lock);
    struct ckpt_step *copy = calloc(r->nstep + 1, sizeof *copy);
    for (size_t i = 0; i < r->nstep; i++) {
        copy[i] = r->step[i];
        copy[i].name = strdup(r->step[i].name);
    }
    *ret_steps = copy;
    *ret_n = r->nstep;
    (void)pthread_mutex_unlock(&r->lock);
    return 0;
}

void ckpt_steps_free(struct ckpt_step *steps, size_t n)
{
    for (size_t i = 0; i < n; i++)
        free(steps[i].name);
    free(steps);
}

int ckpt_run_links(struct ckpt_run *r, struct ckpt_step_link **ret_links, size_t *ret_n,
                   struct ckpt_err *err)
{
    (void)r;
    (void)err;
    *ret_links = NULL;
    *ret_n = 0;
    return 0;
}

void ckpt_step_links_free(struct ckpt_step_link *links, size_t n)
{
    (void)n;
    free(links);
}

static struct ckpt_node *add_child(struct ckpt_node *dir, const char *name, size_t len)
{
    size_t i = dir->nchild;
    struct ckpt_node *n;

    for (size_t k = 0; k < dir->nchild; k++)
        if (strlen(dir->child[k]->name) == len && memcmp(dir->child[k]->name, name, len) == 0)
            return dir->child[k];
    n = calloc(1, sizeof *n);
    memcpy(n->name, name, len);
    for (; i > 0 && strcmp(dir->child[i - 1]->name, n->name) > 0; i--)
        dir->child[i] = dir->child[i - 1];
    dir->child[i] = n;
    dir->nchild++;
    return n;
}

static void add_file(struct ckpt_view *v, const char *path, uint64_t size, int64_t mtime_ns)
{
    struct ckpt_node *dir = &v->root;
    const char *slash;

    for (; (slash = strchr(path, '/')); path = slash + 1) {
        dir = add_child(dir, path, (size_t)(slash - path));
        dir->dir = true;
        dir->mtime_ns = mtime_ns;
    }
    dir = add_child(dir, path, strlen(path));
    dir->size = size;
    dir->mtime_ns = mtime_ns;
}

static int open_view(const char *dir, const struct ckpt_step *step, struct ckpt_view **ret,
                     struct ckpt_err *err)
{
    char buf[256], path[LONGEST], name[200];
    unsigned long long size;
    const char *reason = side_file(dir, "error", buf);

    delay(dir, "open_ms");
    if (reason)
        return fail(err, CKPT_FORMAT, "the step is broken: ", reason);
    (void)snprintf(path, sizeof path, "%s/files", dir);
    FILE *in = fopen(path, "re");
    if (!in)
        return fail(err, CKPT_MISSING, path, ": not there");
    struct ckpt_view *v = calloc(1, sizeof *v);
    atomic_init(&v->nref, 1);
    (void)snprintf(v->path, sizeof v->path, "%s", dir);
    v->generation = step->generation;
    v->root.dir = true;
    v->root.mtime_ns = step->mtime_ns;
    while (fscanf(in, "%199s %llu", name, &size) == 2)
        add_file(v, name, size, step->mtime_ns);
    (void)fclose(in);
    *ret = v;
    return 0;
}

int ckpt_run_view(struct ckpt_run *r, const char *name, struct ckpt_view **ret,
                  struct ckpt_err *err)
{
    struct ckpt_step *step;
    size_t n, at;
    char dir[LONGEST];
    int rc = -1;

    (void)ckpt_run_steps(r, &step, &n, err);
    for (at = 0; at < n; at++)
        if (name ? strcmp(step[at].name, name) == 0 : step[at].is_latest)
            break;
    if (at == n) {
        (void)fail(err, CKPT_MISSING, "no such step: ", name ? name : "latest");
    } else {
        (void)snprintf(dir, sizeof dir, "%s/%s", r->path, step[at].name);
        rc = open_view(dir, &step[at], ret, err);
    }
    ckpt_steps_free(step, n);
    return rc;
}

int ckpt_run_newest_view(struct ckpt_run *r, struct ckpt_view **ret, struct ckpt_err *err)
{
    struct ckpt_step *step;
    size_t n;
    int rc = -1;

    (void)ckpt_run_steps(r, &step, &n, err);
    for (size_t i = n; i-- > 0 && rc < 0;)
        rc = ckpt_run_view(r, step[i].name, ret, err);
    ckpt_steps_free(step, n);
    if (rc == 0 && err)
        *err = (struct ckpt_err){0};
    return rc;
}

struct ckpt_view *ckpt_view_hold(struct ckpt_view *v)
{
    atomic_fetch_add(&v->nref, 1);
    return v;
}

static void free_children(struct ckpt_node *n)
{
    for (size_t i = 0; i < n->nchild; i++) {
        free_children(n->child[i]);
        free(n->child[i]);
    }
}

void ckpt_view_release(struct ckpt_view *v)
{
    if (!v || atomic_fetch_sub(&v->nref, 1) > 1)
        return;
    free_children(&v->root);
    free(v);
}

const struct ckpt_node *ckpt_view_root(const struct ckpt_view *v) { return &v->root; }

const struct ckpt_node *ckpt_view_find(const struct ckpt_view *v, const char *path)
{
    const struct ckpt_node *n = &v->root;

    while (n && *path) {
        size_t len = strcspn(path, "/");
        const struct ckpt_node *next = NULL;
        for (size_t i = 0; i < n->nchild; i++)
            if (strlen(n->child[i]->name) == len && memcmp(n->child[i]->name, path, len) == 0)
                next = n->child[i];
        n = next;
        path += len + (path[len] == '/');
    }
    return n;
}

struct ckpt_view *ckpt_run_view_if_open(struct ckpt_run *r, const char *step)
{
    struct ckpt_view *v;
    char path[LONGEST], text[256];

    (void)snprintf(path, sizeof path, "%s/%s", r->path, step && r->folder ? step : "");
    if (side_file(path, "open_ms", text)) /* such views are opened anew each time */
        return NULL;
    return ckpt_run_view(r, step, &v, &(struct ckpt_err){0}) == 0 ? v : NULL;
}

const char *ckpt_node_name(const struct ckpt_node *n) { return n->name; }

bool ckpt_node_is_dir(const struct ckpt_node *n) { return n->dir; }

uint64_t ckpt_node_size(const struct ckpt_node *n) { return n->size; }

int64_t ckpt_node_mtime_ns(const struct ckpt_node *n) { return n->mtime_ns; }

size_t ckpt_node_children(const struct ckpt_node *n) { return n->nchild; }

const struct ckpt_node *ckpt_node_child(const struct ckpt_node *n, size_t i) { return n->child[i]; }

int ckpt_node_pread(struct ckpt_view *v, const struct ckpt_node *file, void *buf, size_t len,
                    uint64_t off, size_t *ret_len, struct ckpt_err *err)
{
    char text[256];
    unsigned char *out = buf;
    const char *fault = side_file(v->path, "fault", text);
    size_t left = off < file->size ? (size_t)(file->size - off) : 0;

    if (len > left)
        len = left;
    delay(v->path, "read_ms");
    if (fault) {
        uint64_t at = strtoull(text, NULL, 10);
        if (at >= off && at - off < len)
            return fail(err, CKPT_IO, "shard went bad at ", text);
    }
    for (size_t i = 0; i < len; i++) {
        uint64_t p = off + i;
        out[i] = (unsigned char)(131 * p + 17 * (p >> 8) + strlen(file->name));
    }
    *ret_len = len;
    return 0;
}

size_t ckpt_view_tensors(const struct ckpt_view *v) { return v->root.nchild; }

int ckpt_view_tensor(const struct ckpt_view *v, size_t i, struct ckpt_tensor_info *ret,
                     struct ckpt_err *err)
{
    (void)err;
    const struct ckpt_node *n = v->root.child[i];
    *ret = (struct ckpt_tensor_info){.size = sizeof *ret,
                                     .name = n->name,
                                     .dtype = "U8",
                                     .shape = &n->size,
                                     .rank = 1,
                                     .nbytes = n->size,
                                     .file = n};
    return 0;
}

int ckpt_view_tensor_pread(struct ckpt_view *v, size_t i, void *buf, size_t len, uint64_t off,
                           struct ckpt_err *err)
{
    size_t got;
    return ckpt_node_pread(v, v->root.child[i], buf, len, off, &got, err);
}

int ckpt_view_info(struct ckpt_view *v, char **ret_json, struct ckpt_err *err)
{
    (void)v, (void)err;
    *ret_json = strdup("{\"format\": \"fake\"}");
    return 0;
}

int ckpt_run_warnings(struct ckpt_run *run, char **ret_json, struct ckpt_err *err)
{
    (void)run, (void)err;
    *ret_json = strdup("[]");
    return 0;
}

int ckpt_run_facts(struct ckpt_run *run, char **ret_json, struct ckpt_err *err)
{
    (void)run, (void)err;
    *ret_json = strdup("{}");
    return 0;
}

int ckpt_run_stats(struct ckpt_run *r, struct ckpt_stats *ret, struct ckpt_err *err)
{
    (void)err;
    (void)r;
    *ret = (struct ckpt_stats){.size = sizeof *ret};
    return 0;
}

const char *ckpt_view_source(const struct ckpt_view *v)
{
    (void)v;
    return "fake 1, step 0";
}

uint64_t ckpt_view_generation(const struct ckpt_view *v) { return v->generation; }
