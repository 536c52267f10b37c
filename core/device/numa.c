/* SPDX-License-Identifier: Apache-2.0 */
/* Nodes by sysfs, policies by system calls. */
#include "device/numa.h"

#include <ctype.h>
#include <limits.h>
#include <linux/mempolicy.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MOST_NODES = 1024, WORD = sizeof(unsigned long) * CHAR_BIT };

/* CUDA writes 0000:0A:00.0, and some drivers eight digits first; sysfs 0000:0a:00.0. */
static void sysfs_name(const char *id, char *ret, size_t len)
{
    const char *colon = strchr(id, ':');
    size_t n = 0;

    if (colon && colon - id == 8 && strncmp(id, "0000", 4) == 0)
        id += 4;
    for (; *id && n + 1 < len; id++)
        ret[n++] = (char)tolower((unsigned char)*id);
    ret[n] = '\0';
}

int ckpt_numa_node(const char *devices, const char *id)
{
    char name[32], path[PATH_MAX];
    int node = -1;

    sysfs_name(id, name, sizeof name);
    (void)snprintf(path, sizeof path, "%s/%s/numa_node", devices, name);
    FILE *f = fopen(path, "re");
    if (!f)
        return -1;
    if (fscanf(f, "%d", &node) != 1 || node >= MOST_NODES)
        node = -1;
    (void)fclose(f);
    return node < 0 ? -1 : node;
}

void ckpt_numa_prefer(void *mem, size_t len, int node)
{
    unsigned long mask[MOST_NODES / WORD] = {0};

    if (node < 0 || node >= MOST_NODES)
        return;
    mask[(size_t)node / WORD] = 1ul << (size_t)node % WORD;
    (void)syscall(SYS_mbind, mem, len, MPOL_PREFERRED, mask, (unsigned long)MOST_NODES, 0u);
}
