/* SPDX-License-Identifier: Apache-2.0 */
/* Files with O_EXCL, renames and times are all that shared storage must have. */
#include "tool/export/job.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/fdio.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/str.h"

/* INCOMPLETE_MS: a file that somebody is writing is complete after so long, or never. MOST_TEXT:
 * bytes of a job or of the new lines of a journal. */
enum { INCOMPLETE_MS = 3000, POLL_MS = 50, MOST_TEXT = 1 << 30 };

const char ckpt_job_files[] = "files";

static const char JOB[] = "job", PROCESSES[] = "processes", CLAIMS[] = "claims";

struct ckpt_job_limits ckpt_job_usual_limits(void)
{
    struct ckpt_job_limits l = {256 << 20, 5000, 60000, 60000};
    const char *test = getenv("CKPTFS_EXPORT_TEST");

    if (test)
        (void)sscanf(test, "%" SCNu64 ",%" SCNu64 ",%" SCNu64 ",%" SCNu64, &l.cut, &l.beat_ms,
                     &l.stale_ms, &l.launch_ms);
    l.cut = l.cut ? l.cut : 1;
    return l;
}

static int fail(const struct ckpt_job *job, const char *name, int e, struct ckpt_err *err)
{
    return ckpt_fail_errno(err, e, "%s/%s", job->path, name);
}

/* Fail because a file of the work folder, or of a folder in it ("claims/"), could not be read. */
static int fail_read(const struct ckpt_job *job, const char *folder, const char *name, int e,
                     struct ckpt_err *err)
{
    return e == EINVAL ? ckpt_fail(err, CKPT_FORMAT,
                                   "%s/%s%s: it is not a regular file, and no export makes it: "
                                   "remove it",
                                   job->path, folder, name)
                       : ckpt_fail_errno(err, e, "%s/%s%s", job->path, folder, name);
}

/* ---- texts ---- */

/* Read a file from byte `off` to its end; *ret is NUL-terminated, and the caller's. 0 or an errno.
 */
static int read_all(int dir, const char *name, uint64_t off, char **ret, size_t *ret_len,
                    struct stat *ret_st)
{
    ckpt_cleanup(ckpt_closep) int fd =
        openat(dir, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);

    if (fd < 0 || fstat(fd, ret_st) < 0)
        return errno;
    if (!S_ISREG(ret_st->st_mode))
        return EINVAL;
    const uint64_t size = (uint64_t)ret_st->st_size, len = size > off ? size - off : 0;
    if (len > MOST_TEXT)
        return EFBIG;
    ckpt_cleanup(ckpt_freep) char *text = malloc(len + 1);
    const int rc = !text ? ENOMEM : len ? ckpt_fdio_pread(fd, text, len, &off) : 0;
    if (rc)
        return ckpt_fdio_errno(rc);
    text[len] = '\0';
    *ret = ckpt_steal(&text);
    *ret_len = len;
    return 0;
}

/* Write a line into a new file, which is made with O_EXCL. 0 or an errno. */
static int write_new(int dir, const char *name, const char *line, bool sync)
{
    ckpt_cleanup(ckpt_closep) int fd =
        openat(dir, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666);
    uint64_t off = 0;

    if (fd < 0)
        return errno;
    int rc = ckpt_fdio_pwrite(fd, line, strlen(line), &off);
    if (rc == 0 && sync && fsync(fd) < 0)
        rc = errno;
    if (rc)
        (void)unlinkat(dir, name, 0);
    return rc;
}

/* A value as one line; NULL: no memory. */
static char *line_of(const json_t *j)
{
    ckpt_cleanup(ckpt_freep) char *text = j ? json_dumps(j, JSON_COMPACT) : NULL;

    return text ? ckpt_asprintf("%s\n", text) : NULL;
}

/* Read a file whose text ends with a newline as soon as it is complete. MISSING: it is not there;
 * STALE: nobody completes it. */
static int read_line(const struct ckpt_job *job, int dir, const char *folder, const char *name,
                     char **ret, struct ckpt_err *err)
{
    const uint64_t until = ckpt_now_ms() + INCOMPLETE_MS;
    struct stat st;
    size_t len;

    for (;; ckpt_pause_ms(POLL_MS)) {
        ckpt_cleanup(ckpt_freep) char *text = NULL;
        const int e = read_all(dir, name, 0, &text, &len, &st);
        if (e)
            return fail_read(job, folder, name, e, err);
        if (len && text[len - 1] == '\n') {
            text[len - 1] = '\0';
            *ret = ckpt_steal(&text);
            return 0;
        }
        if (ckpt_now_ms() > until)
            return ckpt_fail(err, CKPT_STALE, "%s/%s%s is incomplete", job->path, folder, name);
    }
}

/* ---- the job's file ---- */

static int describe(const json_t *what, bool tell_version, char **ret, struct ckpt_err *err)
{
    const char *command = ckpt_json_str_or(what, "command", "");
    char version[40] = "";

    if (tell_version)
        (void)snprintf(version, sizeof version, ", with xxHash %lld",
                       (long long)json_integer_value(json_object_get(what, "xxhash")));
    *ret = ckpt_asprintf("%s%s%s%s%s", ckpt_json_str_or(what, "export", "unreadable"),
                         *command ? ", by '" : "", command, *command ? "'" : "", version);
    return *ret ? 0 : ckpt_nomem(err);
}

/* Are two jobs the same? All members are, but for who began it. */
static bool same_job(const json_t *a, const json_t *b)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *x = json_copy((json_t *)a), *y = json_copy((json_t *)b);

    if (x && y) {
        (void)json_object_del(x, "command");
        (void)json_object_del(y, "command");
    }
    return x && y && json_equal(x, y);
}

static int compare(const struct ckpt_job *job, const char *shown, const json_t *what,
                   const char *text, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *found = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
    ckpt_cleanup(ckpt_freep) char *theirs = NULL, *ours = NULL;

    if (found && same_job(found, what))
        return 0;
    const bool version =
        found && !json_equal(json_object_get(found, "xxhash"), json_object_get(what, "xxhash"));
    if (describe(found, version, &theirs, err) < 0 || describe(what, version, &ours, err) < 0)
        return -1;
    return ckpt_fail(err, CKPT_CONFLICT,
                     "%s: an unfinished export of something else is there, %s: it is of %s; this "
                     "one is of %s; remove that folder, or choose another directory",
                     shown, job->path, theirs, ours);
}

/* Write the job's file unless there is one, and compare what is there. */
static int agree(struct ckpt_job *job, const char *shown, const json_t *what, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *line = line_of(what), *text = NULL;
    struct ckpt_err why = {0};

    if (!line)
        return ckpt_nomem(err);
    for (int tries = 0; tries < 3; tries++) {
        const int e = write_new(job->dir, JOB, line, true);
        job->is_new = e == 0;
        if (e == 0)
            return 0;
        if (e != EEXIST)
            return ckpt_fail_errno(err, e, "writing %s/%s", job->path, JOB);
        why = (struct ckpt_err){0};
        if (read_line(job, job->dir, "", JOB, &text, &why) == 0)
            return compare(job, shown, what, text, err);
        if (why.code == CKPT_STALE) /* whoever began it was killed before anything was written */
            (void)unlinkat(job->dir, JOB, 0);
        else if (why.code != CKPT_MISSING)
            break;
    }
    return ckpt_err_move(err, &why);
}

/* ---- opening ---- */

static int make_folder(const struct ckpt_job *job, const char *name, struct ckpt_err *err)
{
    return mkdirat(job->dir, name, 0777) == 0 || errno == EEXIST ? 0 : fail(job, name, errno, err);
}

static int open_folder(const struct ckpt_job *job, const char *name, int *ret)
{
    *ret = openat(job->dir, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    return *ret < 0 ? errno : 0;
}

static int init(struct ckpt_job *job, int above, const char *name, const char *shown,
                struct ckpt_err *err)
{
    *job = (struct ckpt_job){.limits = ckpt_job_usual_limits(),
                             .above = above,
                             .dir = -1,
                             .files = -1,
                             .processes = -1,
                             .claims = -1,
                             .journal = -1};
    (void)pthread_mutex_init(&job->lock, NULL);
    ckpt_cond_init(&job->stop);
    const char *slash = strrchr(shown, '/');
    const int n = slash ? (int)(slash + 1 - shown) : 0;
    job->path = ckpt_asprintf("%.*s%s", n, shown, name);
    if (!job->path)
        return ckpt_nomem(err);
    job->name = job->path + n;
    return 0;
}

static int open_dir(struct ckpt_job *job, struct ckpt_err *err)
{
    job->dir = openat(job->above, job->name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    return job->dir < 0 ? ckpt_fail_errno(err, errno, "%s", job->path) : 0;
}

static int open_inner(struct ckpt_job *job, struct ckpt_err *err)
{
    int e = open_folder(job, ckpt_job_files, &job->files);

    if (e && e != ENOENT)
        return fail(job, ckpt_job_files, e, err);
    e = open_folder(job, PROCESSES, &job->processes);
    if (e)
        return fail(job, PROCESSES, e, err);
    e = open_folder(job, CLAIMS, &job->claims);
    return e ? fail(job, CLAIMS, e, err) : 0;
}

/* Remove what ckpt_job_open has made, as far as nobody has put anything into it. */
static void remove_empty(const struct ckpt_job *job)
{
    (void)unlinkat(job->dir, CLAIMS, AT_REMOVEDIR);
    (void)unlinkat(job->dir, PROCESSES, AT_REMOVEDIR);
    (void)unlinkat(job->dir, ckpt_job_files, AT_REMOVEDIR);
    (void)unlinkat(job->above, job->name, AT_REMOVEDIR);
}

int ckpt_job_open(struct ckpt_job *ret, int above, const char *name, const char *shown,
                  const json_t *what, struct ckpt_err *err)
{
    if (init(ret, above, name, shown, err) < 0)
        return -1;
    const bool made = mkdirat(above, name, 0777) == 0;
    if (!made && errno != EEXIST)
        return ckpt_fail_errno(err, errno, "making the folder '%s'", ret->path);
    if (open_dir(ret, err) < 0)
        return -1;
    /* These are made before the job's file: who finds that finds them, too, and files/ is not made
     * again when it has become DEST. */
    int rc = 0;
    if (faccessat(ret->dir, JOB, F_OK, AT_SYMLINK_NOFOLLOW) < 0)
        rc = make_folder(ret, ckpt_job_files, err) < 0 || make_folder(ret, PROCESSES, err) < 0 ||
                     make_folder(ret, CLAIMS, err) < 0
                 ? -1
                 : 0;
    if (rc == 0 && agree(ret, shown, what, err) == 0 && open_inner(ret, err) == 0)
        return 0;
    if (made && faccessat(ret->dir, JOB, F_OK, AT_SYMLINK_NOFOLLOW) < 0)
        remove_empty(ret);
    return -1;
}

int ckpt_job_reopen_files(struct ckpt_job *job, struct ckpt_err *err)
{
    ckpt_closep(&job->files);
    const int e = open_folder(job, ckpt_job_files, &job->files);
    return e ? fail(job, ckpt_job_files, e, err) : 0;
}

int ckpt_job_look(struct ckpt_job *ret, int above, const char *name, const char *shown,
                  json_t **ret_what, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *text = NULL;

    if (init(ret, above, name, shown, err) < 0 || open_dir(ret, err) < 0 ||
        read_line(ret, ret->dir, "", JOB, &text, err) < 0)
        return -1;
    *ret_what = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
    if (!json_is_object(*ret_what)) {
        json_decref(ckpt_steal(ret_what));
        return ckpt_fail(err, CKPT_FORMAT, "%s/%s is not what an export writes", ret->path, JOB);
    }
    return open_inner(ret, err);
}

/* ---- the journals ---- */

static void *beat(void *arg)
{
    struct ckpt_job *job = arg;

    (void)pthread_mutex_lock(&job->lock);
    while (!job->stopped) {
        const struct timespec until = ckpt_deadline(job->limits.beat_ms);
        if (pthread_cond_timedwait(&job->stop, &job->lock, &until) == ETIMEDOUT)
            (void)futimens(job->journal, NULL);
    }
    (void)pthread_mutex_unlock(&job->lock);
    return NULL;
}

int ckpt_job_begin(struct ckpt_job *job, uint32_t part, uint32_t parts, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *head = ckpt_process_line(part, parts);
    ckpt_cleanup(ckpt_freep) char *line = line_of(head), *self = ckpt_process_name();

    if (!line || !self)
        return ckpt_nomem(err);
    int e = write_new(job->processes, self, line, true);
    if (e)
        return ckpt_fail_errno(err, e, "writing %s/%s/%s", job->path, PROCESSES, self);
    job->self = ckpt_steal(&self);
    job->journal = openat(job->processes, job->self, O_WRONLY | O_APPEND | O_CLOEXEC | O_NOFOLLOW);
    if (job->journal < 0)
        return fail(job, job->self, errno, err);
    if ((e = pthread_create(&job->heart, NULL, beat, job)))
        return ckpt_fail_errno(err, e, "starting a thread");
    job->beats = true;
    return 0;
}

int ckpt_job_add(struct ckpt_job *job, json_t *line, struct ckpt_err *err)
{
    return ckpt_job_add_all(job, json_pack("[o]", line), err);
}

int ckpt_job_add_all(struct ckpt_job *job, json_t *lines, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str text = {0};
    bool good = lines;
    json_t *line;
    size_t i;

    json_array_foreach(lines, i, line) {
        ckpt_cleanup(ckpt_freep) char *one = line_of(line);
        good = good && one;
        ckpt_str_puts(&text, one ? one : "");
    }
    json_decref(lines);
    if (!good || text.failed)
        return ckpt_nomem(err);
    const ssize_t n = write(job->journal, text.ptr, text.len); /* at once: others write, too */
    if (n != (ssize_t)text.len || fdatasync(job->journal) < 0)
        return ckpt_fail_errno(err, n >= 0 && n != (ssize_t)text.len ? ENOSPC : errno,
                               "writing %s/%s/%s", job->path, PROCESSES, job->self);
    return 0;
}

static int find_process(struct ckpt_job *job, const char *name, struct ckpt_process **ret,
                        struct ckpt_err *err)
{
    for (size_t i = 0; i < job->all.len; i++)
        if (strcmp(job->all.ptr[i].name, name) == 0) {
            *ret = &job->all.ptr[i];
            return 0;
        }
    ckpt_cleanup(ckpt_freep) char *copy = strdup(name);
    if (!copy || ckpt_vec_add(&job->all, ret) < 0)
        return ckpt_nomem(err);
    (*ret)->name = ckpt_steal(&copy);
    return 0;
}

/* Take the complete lines. A line that a crash has cut off says nothing: what it said is done
 * again. */
static int take_lines(struct ckpt_process *p, char *text, ckpt_job_line *take, void *ctx,
                      struct ckpt_err *err)
{
    for (char *end; (end = strchr(text, '\n')); text = end + 1) {
        const bool first = p->read == 0;
        *end = '\0';
        p->read += (uint64_t)(end + 1 - text);
        ckpt_cleanup(ckpt_json_decrefp) json_t *line =
            json_loads(text, JSON_REJECT_DUPLICATES, NULL);
        if (first && ckpt_process_take(p, line, err) < 0)
            return -1;
        if (json_object_get(line, "end"))
            p->has_ended = true, p->is_good = ckpt_json_bool(line, "end", false);
        else if (line && take && take(ctx, line, err) < 0)
            return -1;
    }
    return 0;
}

static int read_journal(struct ckpt_job *job, const char *name, ckpt_job_line *take, void *ctx,
                        struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    struct ckpt_process *p;
    struct stat st;
    size_t len;

    if (find_process(job, name, &p, err) < 0)
        return -1;
    if (p->has_ended && p->read) /* nobody writes to it any more */
        return 0;
    const int e = read_all(job->processes, name, p->read, &text, &len, &st);
    if (e == ENOENT || e == ESTALE) { /* the job is finished, and its folder is being deleted */
        p->has_ended = true;
        return 0;
    }
    if (e)
        return fail_read(job, "processes/", name, e, err);
    p->beat_ns = ckpt_job_mtime_ns(&st);
    if (!p->begin_ns)
        p->begin_ns = p->beat_ns;
    return take_lines(p, text, take, ctx, err);
}

/* The storage's time, as this process's journal has it after a heartbeat. */
static int64_t storage_now_ns(const struct ckpt_job *job)
{
    struct timespec now = {0};
    struct stat st;

    if (job->journal >= 0 && futimens(job->journal, NULL) == 0 && fstat(job->journal, &st) == 0)
        return ckpt_job_mtime_ns(&st);
    (void)clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

int ckpt_job_refresh(struct ckpt_job *job, ckpt_job_line *take, void *ctx, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_closep) int copy =
        openat(job->processes, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *d = copy >= 0 ? fdopendir(copy) : NULL;
    int rc = 0;

    if (!d)
        return errno == ENOENT || errno == ESTALE ? 0 : fail(job, PROCESSES, errno, err);
    copy = -1; /* it is d's */
    const int64_t now_ns = storage_now_ns(job);
    for (struct dirent *e; rc == 0 && (e = readdir(d));)
        if (e->d_name[0] != '.')
            rc = read_journal(job, e->d_name, take, ctx, err);
    (void)closedir(d);
    for (size_t i = 0; i < job->all.len; i++) {
        struct ckpt_process *p = &job->all.ptr[i];
        p->lives = ckpt_process_life(p, now_ns, job->limits.stale_ms) != CKPT_DEAD;
        p->has_lived = p->has_lived || p->lives;
    }
    return rc;
}

/* ---- who lives ---- */

const struct ckpt_process *ckpt_job_other(const struct ckpt_job *job)
{
    for (size_t i = 0; i < job->all.len; i++) {
        const struct ckpt_process *p = &job->all.ptr[i];
        if ((!job->self || strcmp(p->name, job->self) != 0) && p->lives)
            return p;
    }
    return NULL;
}

/* Find out whether a process lives, however long that takes: of another host, either its heart
 * beats once more, or it has been silent for too long. */
static int await_life(struct ckpt_job *job, const char *name, bool *ret_lives, struct ckpt_err *err)
{
    int64_t first_ns = -1;

    for (;; ckpt_pause_ms(job->limits.beat_ms / 4 + 1)) {
        struct ckpt_process *p, now;
        struct stat st;
        if (find_process(job, name, &p, err) < 0)
            return -1;
        now = *p;
        /* the lines of its journal are read by ckpt_job_refresh: here is its time alone */
        if (fstatat(job->processes, name, &st, AT_SYMLINK_NOFOLLOW) == 0)
            now.beat_ns = ckpt_job_mtime_ns(&st);
        const enum ckpt_life life =
            ckpt_process_life(&now, storage_now_ns(job), job->limits.stale_ms);
        *ret_lives = life != CKPT_DEAD;
        if (life != CKPT_SEEMS_ALIVE || (first_ns >= 0 && now.beat_ns != first_ns))
            return 0;
        first_ns = now.beat_ns;
    }
}

/* ---- claims ---- */

/* Who has made this claim? A claim without a name is of a process that was killed between two
 * calls. 0: *ret_lives says whether its holder lives. */
static int holder_of(struct ckpt_job *job, const char *claim, size_t *ret_holder, bool *ret_lives,
                     bool *ret_self, bool patient, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *name = NULL;
    struct ckpt_err why = {0};
    struct ckpt_process *p;

    *ret_self = *ret_lives = false;
    if (read_line(job, job->claims, "claims/", claim, &name, &why) < 0)
        return why.code == CKPT_STALE ? 0 : ckpt_err_move(err, &why);
    if (strchr(name, '/') || *name == '.')
        return ckpt_fail(err, CKPT_FORMAT, "%s/%s/%s is no claim of an export", job->path, CLAIMS,
                         claim);
    *ret_self = strcmp(name, job->self) == 0;
    if (*ret_self)
        return 0;
    if (find_process(job, name, &p, err) < 0)
        return -1;
    *ret_holder = (size_t)(p - job->all.ptr);
    if (!p->is_known) {
        if (read_journal(job, name, NULL, NULL, err) < 0)
            return -1;
        p->read = 0; /* ckpt_job_refresh reads its other lines */
    }
    if (patient)
        return await_life(job, name, ret_lives, err);
    *ret_lives = ckpt_process_life(p, storage_now_ns(job), job->limits.stale_ms) != CKPT_DEAD;
    return 0;
}

int ckpt_job_claim(struct ckpt_job *job, const char *id, bool patient, size_t *ret_holder,
                   struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *line = ckpt_asprintf("%s\n", job->self);

    if (!line)
        return ckpt_nomem(err);
    for (unsigned turn = 0;; turn++) {
        ckpt_cleanup(ckpt_freep) char *claim = ckpt_asprintf("%s.%u", id, turn);
        bool lives, self;
        if (!claim)
            return ckpt_nomem(err);
        const int e = write_new(job->claims, claim, line, false);
        if (e == 0)
            return 1;
        if (e != EEXIST)
            return ckpt_fail_errno(err, e, "writing %s/%s/%s", job->path, CLAIMS, claim);
        if (holder_of(job, claim, ret_holder, &lives, &self, patient, err) < 0)
            return -1;
        if (self || lives)
            return self;
    }
}

/* ---- the end ---- */

bool ckpt_job_is_named(const struct ckpt_job *job)
{
    return faccessat(job->dir, ckpt_job_files, F_OK, AT_SYMLINK_NOFOLLOW) < 0 && errno == ENOENT;
}

void ckpt_job_end(struct ckpt_job *job, bool good)
{
    if (!job->path) /* it was never opened */
        return;
    if (job->beats) {
        (void)pthread_mutex_lock(&job->lock);
        job->stopped = true;
        (void)pthread_cond_broadcast(&job->stop);
        (void)pthread_mutex_unlock(&job->lock);
        (void)pthread_join(job->heart, NULL);
        job->beats = false;
    }
    if (job->journal >= 0) {
        (void)ckpt_job_add(job, json_pack("{s:b}", "end", good), NULL);
        ckpt_closep(&job->journal);
    }
}

static void empty_folder(int dir)
{
    ckpt_cleanup(ckpt_closep) int copy =
        dir < 0 ? -1 : openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *d = copy >= 0 ? fdopendir(copy) : NULL;

    if (!d)
        return;
    copy = -1; /* it is d's */
    for (struct dirent *e; (e = readdir(d));)
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0)
            (void)unlinkat(dir, e->d_name, 0);
    (void)closedir(d);
}

void ckpt_job_remove(struct ckpt_job *job)
{
    if (job->dir < 0)
        return;
    empty_folder(job->claims);
    empty_folder(job->processes);
    (void)unlinkat(job->dir, JOB, 0);
    remove_empty(job);
}

void ckpt_job_release(struct ckpt_job *job)
{
    if (!job->path) /* it was never opened */
        return;
    ckpt_job_end(job, true);
    for (size_t i = 0; i < job->all.len; i++)
        ckpt_process_release(&job->all.ptr[i]);
    ckpt_vec_release(&job->all);
    ckpt_closep(&job->claims);
    ckpt_closep(&job->processes);
    ckpt_closep(&job->files);
    ckpt_closep(&job->dir);
    free(job->self);
    free(job->path);
    (void)pthread_cond_destroy(&job->stop);
    (void)pthread_mutex_destroy(&job->lock);
    *job = (struct ckpt_job){0};
}
