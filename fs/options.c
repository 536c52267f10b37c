/* SPDX-License-Identifier: Apache-2.0 */
/* Splitting lists of options (-o), for both programs. */
#include "cmdline.h"

#include <getopt.h>
#include <string.h>

#include "base/err.h"
#include "base/mem.h"

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

static void underline(char *word)
{
    for (; *word; word++)
        if (*word == '-')
            *word = '_';
}

int ckptfs_long_option(int argc, char **argv,
                       int (*set)(void *ctx, const char *word, const char *value,
                                  struct ckpt_err *err),
                       void *ctx, struct ckpt_err *err)
{
    const char *given = argv[optind - 1];
    struct ckpt_err bare = {0};

    if (strncmp(given, "--", 2) != 0 || !given[2])
        return ckpt_fail(err, CKPT_USAGE, "%s: no such option", given);
    ckpt_cleanup(ckpt_freep) char *word = strdup(given + 2);
    if (!word)
        return ckpt_nomem(err);
    char *value = strchr(word, '=');
    if (value)
        *value++ = '\0';
    underline(word);
    if (value)
        return set(ctx, word, value, err);
    if (set(ctx, word, NULL, &bare) == 0)
        return 0;
    if (optind >= argc)
        return ckpt_err_move(err, &bare);
    if (set(ctx, word, argv[optind], err) < 0)
        return -1;
    optind++;
    return 0;
}
