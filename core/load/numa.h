/* SPDX-License-Identifier: Apache-2.0 */
/* Where memory lies on a machine of several nodes (sockets), without libnuma. */
#ifndef CKPT_LOAD_NUMA_H
#define CKPT_LOAD_NUMA_H

#include <stddef.h>

/* The node of the PCI device that CUDA calls `id`, as a directory like /sys/bus/pci/devices has it;
 * -1: the machine has one, or does not say. */
int ckpt_numa_node(const char *devices, const char *id);

/* Let pages that are not there yet come from that node, if it has any left: it is faster, and
 * nothing else depends on it. mem begins a page. -1: from any. */
void ckpt_numa_prefer(void *mem, size_t len, int node);

#endif
