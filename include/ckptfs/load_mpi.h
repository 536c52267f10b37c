/* SPDX-License-Identifier: Apache-2.0 */
/* Loads over an MPI communicator. Link libckptfs_load_mpi in addition to libckptfs_load.
 *
 * MPI must be initialised with MPI_THREAD_MULTIPLE, because a load makes progress on its own
 * threads; with less, ckpt_comm_mpi fails with USAGE. All data is in host memory. */
#ifndef CKPTFS_LOAD_MPI_H
#define CKPTFS_LOAD_MPI_H

#include <mpi.h>

#include <ckptfs/load.h>

#ifdef __cplusplus
extern "C" {
#endif

/* COLLECTIVE over `mpi`. Make a comm over a duplicate of the communicator. `mpi` itself stays the
 * caller's and is never aborted. Call ckpt_comm_free before MPI_Finalize. */
CKPT_PUBLIC int ckpt_comm_mpi(MPI_Comm mpi, struct ckpt_comm **ret, struct ckpt_err *err);

#ifdef __cplusplus
}
#endif

#endif
