/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks of an MPI communicator (link libckptfs_load_mpi too).
 *
 * MPI must be initialised with MPI_THREAD_FUNNELED or more. With MPI_THREAD_MULTIPLE loads proceed
 * by themselves; with less, only while their thread, which must be the one that MPI wants, is in
 * ckpt_load_wait or ckpt_load_next. All data is in host memory. */
#ifndef CKPTFS_LOAD_MPI_H
#define CKPTFS_LOAD_MPI_H

#include <mpi.h>

#include <ckptfs/load.h>

#ifdef __cplusplus
extern "C" {
#endif

/* COLLECTIVE. A comm over a duplicate of `mpi`, which stays the caller's and is never aborted.
 * Free it before MPI_Finalize. */
CKPT_PUBLIC int ckpt_comm_mpi(MPI_Comm mpi, struct ckpt_comm **ret, struct ckpt_err *err);

#ifdef __cplusplus
}
#endif

#endif
