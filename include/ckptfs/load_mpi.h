/* SPDX-License-Identifier: Apache-2.0 */
/* Loads over an MPI communicator. Link libckptfs_load_mpi in addition to libckptfs_load.
 *
 * MPI must be initialised with at least MPI_THREAD_FUNNELED. With MPI_THREAD_MULTIPLE a load makes
 * progress on its own threads. With less, it makes progress only inside ckpt_load_wait and
 * ckpt_load_next, which must then be called from the thread that initialised MPI. All data is in
 * host memory. */
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
