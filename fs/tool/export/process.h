/* SPDX-License-Identifier: Apache-2.0 */
/* A process that takes part in an export, as the others see it: by the first line of its journal,
 * which says where it runs, and by the time of the journal, which is its heartbeat. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include <jansson.h>

#include <ckptfs/err.h>

struct ckpt_process {
    char *name;  /* of its journal */
    char *host;  /* for messages */
    char *where; /* processes with the same text see each other's numbers; "": not known */
    int64_t pid;
    uint64_t start;            /* when it began, by the kernel's count; 0: not known */
    uint32_t part, parts;      /* it writes part `part` of `parts`, from 1 */
    bool is_known;             /* its first line has been read */
    bool has_ended, is_good;   /* its last line says so, and that it did what it had to */
    bool lives, has_lived;     /* when its journal was read last; at any time */
    int64_t begin_ns, beat_ns; /* the time of its journal, when it was seen first and last, by the
                                  storage's clock */
    uint64_t read;             /* so many bytes of its journal have been read */
};

/* The first line of this process's journal; NULL: no memory. */
json_t *ckpt_process_line(uint32_t part, uint32_t parts);

/* A name for this process's journal, which no other has. The caller frees it; NULL: no memory. */
char *ckpt_process_name(void);

/* Take the first line of a journal. One that is none says nothing: the process stays unknown. */
int ckpt_process_take(struct ckpt_process *p, const json_t *line, struct ckpt_err *err);
void ckpt_process_release(struct ckpt_process *p);

enum ckpt_life { CKPT_DEAD, CKPT_LIVES, CKPT_SEEMS_ALIVE /* by its heartbeat alone */ };

/* Does the process live? On this host the kernel knows it. Of another host the heartbeat tells:
 * dead is a process that has been silent for more than stale_ms before now_ns, which is the
 * storage's time, too. */
enum ckpt_life ckpt_process_life(const struct ckpt_process *p, int64_t now_ns, uint64_t stale_ms);

/* "part 2/4 (host node7, process 123)" or, if there is one part only, "host node7, process 123".
 * The caller frees it; NULL: no memory. */
char *ckpt_process_text(const struct ckpt_process *p);
