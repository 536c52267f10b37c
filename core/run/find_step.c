/* SPDX-License-Identifier: Apache-2.0 */
/* Finding the step that a user means: by name, by number, or the latest. */
#include <stdio.h>
#include <string.h>

#include <ckptfs/ckptfs.h>

#include "base/err.h"
#include "base/str.h"

enum { MOST_NAMED = 12 }; /* steps, in an error */

/* Does the name end in that number? "iter_0000200" ends in 200. */
static bool ends_in_number(const char *name, const char *number)
{
    size_t n = strlen(name), digits = 0;

    while (digits < n && name[n - 1 - digits] >= '0' && name[n - 1 - digits] <= '9')
        digits++;
    for (name += n - digits; digits > 1 && *name == '0'; digits--)
        name++;
    return digits > 0 && strcmp(name, number) == 0;
}

/* Count the steps that `want` can mean, and return one of them. A step with exactly that name has
 * priority over steps whose names end in that number. */
static size_t count_hits(const struct ckpt_step *step, size_t n, const char *want, size_t *ret_hit)
{
    size_t hits = 0;

    for (size_t i = 0; i < n; i++) {
        if (want ? strcmp(step[i].name, want) == 0 : step[i].is_latest) {
            *ret_hit = i;
            return 1;
        }
        if (want && ends_in_number(step[i].name, want)) {
            *ret_hit = i;
            hits++;
        }
    }
    return hits;
}

/* "5, 10, 100 and 12 older ones": the newest few, which people look for. */
static int fail_missing(const struct ckpt_step *step, size_t n, const char *want,
                        struct ckpt_err *err)
{
    const size_t first = n > MOST_NAMED ? n - MOST_NAMED : 0;
    struct ckpt_str names = {0};
    char older[48] = "";

    for (size_t i = first; i < n; i++)
        ckpt_str_printf(&names, "%s%s", i > first ? ", " : "", step[i].name);
    if (first)
        (void)snprintf(older, sizeof older, ", and %zu older ones", first);
    (void)ckpt_fail(err, CKPT_MISSING, "step '%s': the run has no such step; it has %s%s",
                    want ? want : "latest", names.len ? names.ptr : "none", older);
    ckpt_str_release(&names);
    return -1;
}

/* Find the step to which the link `want` leads: *ret_name is new, or NULL: there is no such link.
 */
static int find_link(struct ckpt_run *run, const char *want, char **ret_name, struct ckpt_err *err)
{
    struct ckpt_step_link *link = NULL;
    size_t n = 0;
    bool good = true;

    *ret_name = NULL;
    if (ckpt_run_links(run, &link, &n, err) < 0)
        return -1;
    for (size_t i = 0; i < n; i++)
        if (strcmp(link[i].name, want) == 0)
            good = (*ret_name = strdup(link[i].step)) != NULL;
    ckpt_step_links_free(link, n);
    return good ? 0 : ckpt_nomem(err);
}

int ckpt_run_find_step(struct ckpt_run *run, const char *want, char **ret_name,
                       struct ckpt_err *err)
{
    struct ckpt_step *step = NULL;
    size_t n = 0, hit = 0;
    int result = 0;

    if (want && !ckpt_run_is_folder(run))
        return ckpt_fail(err, CKPT_USAGE,
                         "step '%s': this is one checkpoint, not a folder of steps", want);
    if (want && find_link(run, want, ret_name, err) < 0)
        return -1;
    if (want && *ret_name)
        return 0;
    if (ckpt_run_steps(run, &step, &n, err) < 0)
        return -1;
    const size_t hits = count_hits(step, n, want, &hit);
    if (hits > 1)
        result = ckpt_fail(err, CKPT_CONFLICT, "step '%s': several steps end in this number", want);
    else if (hits == 0)
        result = fail_missing(step, n, want, err);
    else if (!(*ret_name = strdup(step[hit].name)))
        result = ckpt_nomem(err);
    ckpt_steps_free(step, n);
    return result;
}
