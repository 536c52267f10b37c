/* SPDX-License-Identifier: Apache-2.0 */
/* How fast things are here: measured by all ranks together, in milliseconds, with a few MiB. */
#ifndef CKPT_LOAD_RATES_H
#define CKPT_LOAD_RATES_H

#include <stdint.h>

#include "load/comm.h"
#include "tensor/catalog.h"

/* Where the ranks run, and what is known of the files. */
struct ckpt_rates_site {
    struct ckpt_comm *comm;
    const struct ckpt_catalog *cat;
    const uint32_t *node; /* of each rank, 0 .. nnode-1 */
    uint32_t nnode;
    double hot;     /* part of the files that is in the page caches */
    uint64_t bytes; /* that the job reads */
    uint32_t timeout_ms;
};

/* COLLECTIVE. Fill in those of *rates (equal on all ranks) that are 0 and can be measured: what the
 * slowest node does. The rest stays 0. All ranks get the same. */
int ckpt_rates_measure(const struct ckpt_rates_site *site, struct ckpt_rates *rates,
                       struct ckpt_err *err);

/* COLLECTIVE, of ranks with devices: copy and local_link of this rank, network of its node. */
int ckpt_rates_of_devices(const struct ckpt_rates_site *site, struct ckpt_rates *ret,
                          struct ckpt_err *err);

#endif
