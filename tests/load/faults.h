/* SPDX-License-Identifier: Apache-2.0 */
/* Faults of one rank: its files are below a folder whose name contains "rank<N>", and reads of them
 * go wrong (the program is linked with --wrap=pread and preadv).
 *
 *     eio@N   short@N   delay@N:MS   hang@N
 *
 * N = 99: those of every rank. */
#ifndef CKPT_TESTS_LOAD_FAULTS_H
#define CKPT_TESTS_LOAD_FAULTS_H

#include <stdint.h>

void faults_set(const char *text);
void faults_arm(void); /* from now on */
void faults_disarm(void);
uint32_t faults_timeout(void); /* ms, of reads; 0: the default */

#endif
