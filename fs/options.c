/* SPDX-License-Identifier: Apache-2.0 */
/* Splitting lists of options (-o), for both programs. */
#include "cmdline.h"

#include <string.h>

bool ckptfs_next_option(char **list, char **ret_word, char **ret_value)
{
    char *in = *list, *out;

    while (*in == ',')
        in++;
    if (!*in)
        return false;
    *ret_word = out = in;
    *ret_value = NULL;
    for (; *in && *in != ','; in++) {
        if (*in == '\\' && (in[1] == ',' || in[1] == '\\')) {
            *out++ = *++in;
        } else if (*in == '=' && !*ret_value) {
            *out++ = '\0';
            *ret_value = out;
        } else {
            *out++ = *in;
        }
    }
    *list = *in ? in + 1 : in;
    *out = '\0';
    return true;
}
