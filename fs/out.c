/* SPDX-License-Identifier: Apache-2.0 */
/* Tables, JSON and outlines on stdout; a progress bar on stderr. */
#include "out.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/str.h"

const char *ckpt_out_size(uint64_t bytes, char buf[CKPT_OUT_SIZE])
{
    static const char *const unit[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    double n = (double)bytes;
    size_t i = 0;

    for (; n >= 1024 && i + 1 < sizeof unit / sizeof *unit; i++)
        n /= 1024;
    (void)snprintf(buf, CKPT_OUT_SIZE, i ? "%.1f %s" : "%.0f %s", n, unit[i]);
    return buf;
}

char *ckpt_out_numbers(const uint64_t *number, size_t n, const char *between)
{
    struct ckpt_str out = {0};
    char *text = NULL;

    for (size_t i = 0; i < n; i++)
        ckpt_str_printf(&out, "%s%" PRIu64, i ? between : "", number[i]);
    (void)ckpt_str_steal(&out, &text, NULL);
    return text;
}

static bool styled(void)
{
    const char *term = getenv("TERM");
    return isatty(STDOUT_FILENO) && !getenv("NO_COLOR") && term && strcmp(term, "dumb") != 0;
}

const char *ckpt_out_bold(void) { return styled() ? "\033[1m" : ""; }

const char *ckpt_out_plain(void) { return styled() ? "\033[0m" : ""; }

static void put_row(const char *const *cell, const char *align, const size_t *width, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        bool last = i + 1 == n;
        if (align[i] == 'r')
            (void)printf("%*s", (int)width[i], cell[i]);
        else
            (void)printf("%-*s", last ? 0 : (int)width[i], cell[i]);
        (void)fputs(last ? "\n" : "  ", stdout);
    }
}

void ckpt_out_table(const char *const *head, const char *align, size_t ncolumn, char *const *cell,
                    size_t ncell)
{
    enum { MOST_COLUMNS = 8 };
    size_t width[MOST_COLUMNS] = {0};

    for (size_t i = 0; i < ncolumn; i++)
        width[i] = head ? strlen(head[i]) : 0;
    for (size_t i = 0; i < ncell; i++)
        if (strlen(cell[i]) > width[i % ncolumn])
            width[i % ncolumn] = strlen(cell[i]);
    if (head) {
        (void)fputs(ckpt_out_bold(), stdout);
        put_row(head, align, width, ncolumn);
        (void)fputs(ckpt_out_plain(), stdout);
    }
    for (size_t i = 0; i + ncolumn <= ncell; i += ncolumn)
        put_row((const char *const *)cell + i, align, width, ncolumn);
}

int ckpt_out_parse(const char *text, json_t **ret, struct ckpt_err *err)
{
    json_error_t at;

    *ret = json_loads(text, JSON_DECODE_ANY, &at);
    return *ret ? 0 : ckpt_fail(err, CKPT_FORMAT, "the library's JSON: %s", at.text);
}

static int put_json(const json_t *j, size_t layout, struct ckpt_err *err)
{
    if (!j)
        return ckpt_nomem(err);
    if (json_dumpf(j, stdout, layout | JSON_ENCODE_ANY | JSON_REAL_PRECISION(9)) < 0)
        return ckpt_fail(err, CKPT_IO, "the output could not be written");
    (void)fputc('\n', stdout);
    return 0;
}

int ckpt_out_json(const json_t *j, struct ckpt_err *err)
{
    return put_json(j, JSON_INDENT(2), err);
}

int ckpt_out_json_line(const json_t *j, struct ckpt_err *err)
{
    return put_json(j, JSON_COMPACT, err);
}

static bool is_flat(const json_t *j) { return !json_is_object(j) && !json_is_array(j); }

static void put_flat(const json_t *j)
{
    if (json_is_string(j))
        (void)fputs(json_string_value(j), stdout);
    else
        (void)json_dumpf(j, stdout, JSON_ENCODE_ANY | JSON_REAL_PRECISION(6));
}

/* Is it a list of a few short values, which fits on one line? */
static bool fits_line(const json_t *j)
{
    size_t chars = 0, i;
    const json_t *item;

    if (!json_is_array(j))
        return false;
    json_array_foreach(j, i, item) {
        if (!is_flat(item))
            return false;
        chars += json_is_string(item) ? json_string_length(item) + 2 : 8;
    }
    return chars <= 72;
}

/* Keys of programs have '_' between words. */
static void put_key(const char *key)
{
    for (; *key; key++)
        (void)fputc(*key == '_' ? ' ' : *key, stdout);
}

static void put_line_list(const json_t *j)
{
    const json_t *item;
    size_t i;

    json_array_foreach(j, i, item) {
        (void)fputs(i ? ", " : "", stdout);
        put_flat(item);
    }
    (void)fputc('\n', stdout);
}

/* Is it an object of a few short values? */
static bool fits_line_object(const json_t *j)
{
    size_t chars = 0;
    const char *key;
    json_t *value;

    json_object_foreach((json_t *)j, key, value) {
        if (!is_flat(value))
            return false;
        chars += strlen(key) + 2 + (json_is_string(value) ? json_string_length(value) : 6);
    }
    return json_is_object(j) && chars <= 72;
}

static void put_line_object(const json_t *j)
{
    const char *key, *between = "";
    json_t *value;

    json_object_foreach((json_t *)j, key, value) {
        (void)fputs(between, stdout);
        put_key(key);
        (void)fputc(' ', stdout);
        put_flat(value);
        between = ", ";
    }
    (void)fputc('\n', stdout);
}

static void outline(const json_t *j, int indent, bool hanging);

/* Print the value after "key:" or "-". */
static void put_value(const json_t *j, int indent, bool item)
{
    if (is_flat(j)) {
        (void)fputc(' ', stdout);
        put_flat(j);
        (void)fputc('\n', stdout);
    } else if (fits_line(j)) {
        (void)fputs(json_array_size(j) ? " " : " none", stdout);
        put_line_list(j);
    } else if (item && fits_line_object(j)) {
        (void)fputc(' ', stdout);
        put_line_object(j);
    } else if (item && json_is_object(j)) {
        (void)fputc(' ', stdout);
        outline(j, indent, true);
    } else {
        (void)fputc('\n', stdout);
        outline(j, indent, false);
    }
}

/* Print an outline. hanging: the first line is already indented. The parser limits the depth. */
static void outline(const json_t *j, int indent, bool hanging)
{
    const char *key;
    json_t *value;
    size_t i;

    if (json_is_object(j)) {
        json_object_foreach((json_t *)j, key, value) {
            (void)printf("%*s", hanging ? 0 : indent, "");
            put_key(key);
            (void)fputc(':', stdout);
            hanging = false;
            put_value(value, indent + 2, false);
        }
    } else if (json_is_array(j)) {
        json_array_foreach(j, i, value) {
            (void)printf("%*s-", indent, "");
            put_value(value, indent + 2, true);
        }
    } else {
        put_value(j, indent, false);
    }
}

void ckpt_out_outline(const json_t *j) { outline(j, 0, false); }

/* ---- one line, redrawn in place: bar, bytes, rate, time left, name ---- */

enum { BAR_CELLS = 24, PLAIN_COLUMNS = 80 };

void ckpt_progress_begin(struct ckpt_progress *p, uint64_t already, uint64_t total, bool quiet)
{
    *p = (struct ckpt_progress){.shown = !quiet && isatty(STDERR_FILENO),
                                .begin = ckpt_now_ns(),
                                .already = already,
                                .total = total};
}

static int columns(void)
{
    struct winsize size;
    return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col ? size.ws_col
                                                                       : PLAIN_COLUMNS;
}

/* Write a time as "1:02:03" or "2:03". */
static void put_time(char *buf, size_t len, double s)
{
    unsigned long t = s > 0 && s < 1e8 ? (unsigned long)s : 0;

    if (t >= 3600)
        (void)snprintf(buf, len, "%lu:%02lu:%02lu", t / 3600, t / 60 % 60, t % 60);
    else
        (void)snprintf(buf, len, "%lu:%02lu", t / 60, t % 60);
}

void ckpt_progress_draw(const struct ckpt_progress *p, uint64_t done, const char *name)
{
    char bar[BAR_CELLS + 1], line[512], left[32] = "-", have[CKPT_OUT_SIZE], all[CKPT_OUT_SIZE],
                                        rate_text[CKPT_OUT_SIZE];
    double part = p->total ? (double)done / (double)p->total : 1,
           spent = (double)(ckpt_now_ns() - p->begin) * 1e-9;
    double rate = spent > 0 ? (double)(done - p->already) / spent : 0;
    int full = (int)(part * BAR_CELLS);

    if (!p->shown)
        return;
    for (int i = 0; i < BAR_CELLS; i++)
        bar[i] = i < full ? '#' : '.';
    bar[BAR_CELLS] = '\0';
    if (rate > 0)
        put_time(left, sizeof left, (double)(p->total - done) / rate);
    (void)snprintf(line, sizeof line, "[%s] %3d%%  %s of %s  %s/s  ETA %s  %s", bar,
                   (int)(part * 100), ckpt_out_size(done, have), ckpt_out_size(p->total, all),
                   ckpt_out_size((uint64_t)rate, rate_text), left, name);
    (void)fprintf(stderr, "\r%.*s\033[K", columns() - 1, line);
    (void)fflush(stderr);
}

void ckpt_progress_end(const struct ckpt_progress *p)
{
    if (p->shown)
        (void)fputs("\r\033[K", stderr);
}
