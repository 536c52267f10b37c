/* SPDX-License-Identifier: Apache-2.0 */
/* /sys/class/bdi/MAJ:MIN/read_ahead_kb. */
#include "mount/mount.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/mem.h"

static unsigned read_back(const char *path)
{
    ckpt_cleanup(ckpt_closep) int fd = open(path, O_RDONLY | O_CLOEXEC);
    char text[32] = "";

    if (fd < 0 || read(fd, text, sizeof text - 1) <= 0)
        return 0;
    return (unsigned)strtoul(text, NULL, 10);
}

static bool write_text(const char *path, const char *text)
{
    ckpt_cleanup(ckpt_closep) int fd = open(path, O_WRONLY | O_CLOEXEC);
    return fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);
}

void ckptfs_readahead_set(const struct ckptfs_config *config, struct ckptfs_negotiated *n)
{
    const unsigned want = config->readahead_kib;
    char path[80], text[16];
    struct statx st;

    /* only the device, which the kernel knows without asking the daemon */
    if (statx(AT_FDCWD, config->mountpoint, AT_STATX_DONT_SYNC, 0, &st) < 0)
        return;
    (void)snprintf(n->dev, sizeof n->dev, "%u:%u", st.stx_dev_major, st.stx_dev_minor);
    (void)snprintf(path, sizeof path, "/sys/class/bdi/%s/read_ahead_kb", n->dev);
    (void)snprintf(text, sizeof text, "%u", want);
    if (want)
        n->readahead_refused = !write_text(path, text);
    n->readahead_kib = read_back(path);
}
