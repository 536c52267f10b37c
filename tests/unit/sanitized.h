/* SPDX-License-Identifier: Apache-2.0 */
/* Is this a build with ASan or TSan? Tests that try many random cases try fewer of them then. */
#ifndef CKPT_TESTS_UNIT_SANITIZED_H
#define CKPT_TESTS_UNIT_SANITIZED_H

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif

#endif
