/* SPDX-License-Identifier: Apache-2.0 */
/* Placing host memory on the NUMA node that is nearest to a device, without libnuma. */
#pragma once

#include <stddef.h>

/* The NUMA node of the PCI device with CUDA's bus id `id`, read from a directory like
 * /sys/bus/pci/devices; -1: the machine has only one node, or the directory does not say. */
int ckpt_numa_node(const char *devices, const char *id);

/* Ask the kernel to take pages of this mapping that are not allocated yet from the node, as long as
 * it has free ones. Errors are ignored, because only speed depends on it. mem is aligned to a page.
 * node -1: do nothing. */
void ckpt_numa_prefer(void *mem, size_t len, int node);
