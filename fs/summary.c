/* SPDX-License-Identifier: Apache-2.0 */
/* Facts as lines for people: "label   text". */
#include "summary.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/err.h"
#include "base/json.h"
#include "base/mem.h"
#include "out.h"

static json_int_t number_of(const json_t *j, const char *key)
{
    return json_integer_value(json_object_get(j, key));
}

static void put_label(const char *label)
{
    (void)printf("%s%-10s%s", ckpt_out_bold(), label, ckpt_out_plain());
}

__attribute__((format(printf, 2, 3))) static void line(const char *label, const char *format, ...)
{
    va_list args;

    put_label(label);
    va_start(args, format);
    (void)vprintf(format, args);
    va_end(args);
    (void)putchar('\n');
}

static const char *plural(json_int_t n) { return n == 1 ? "" : "s"; }

/* ---- a run ---- */

/* "7.2 B" parameters, as people name models. */
static const char *count_text(json_int_t count, char buf[CKPT_OUT_SIZE])
{
    static const char *const unit[] = {"", " K", " M", " B", " T"};
    double n = (double)count;
    size_t i = 0;

    for (; n >= 1000 && i + 1 < sizeof unit / sizeof *unit; i++)
        n /= 1000;
    (void)snprintf(buf, CKPT_OUT_SIZE, i ? "%.1f%s" : "%.0f%s", n, unit[i]);
    return buf;
}

/* How the run divided the model, as far as the checkpoint says. */
static void put_topology(const json_t *info)
{
    static const char *const key[][2] = {{"tp", "TP"}, {"pp", "PP"}, {"ep", "EP"},
                                         {"cp", "CP"}, {"dp", "DP"}, {"ranks", "ranks"}};
    const char *before = ", written with ";

    for (size_t i = 0; i < sizeof key / sizeof *key; i++) {
        char shards[16];
        (void)snprintf(shards, sizeof shards, "shard_%s", key[i][0]);
        const json_t *n = json_object_get(info, shards);
        if (!json_is_integer(n))
            n = json_object_get(info, key[i][0]);
        if (!json_is_integer(n))
            continue;
        (void)printf("%s%s %" JSON_INTEGER_FORMAT, before, key[i][1], json_integer_value(n));
        before = ", ";
    }
}

static void put_format(const json_t *info)
{
    static const char *const key[] = {"format", "version", "container"};

    put_label("format");
    for (size_t i = 0; i < sizeof key / sizeof *key; i++) {
        const char *text = ckpt_json_str(info, key[i]);
        (void)printf("%s%s", i && text ? " " : "", text ? text : i ? "" : "?");
    }
    put_topology(info);
    (void)putchar('\n');
}

enum { FEW_STEPS = 4 }; /* each is named */

static void put_steps(const json_t *steps)
{
    const size_t n = json_array_size(steps);

    if (n > 0 && n <= FEW_STEPS) {
        put_label("steps");
        (void)printf("%zu: ", n);
        for (size_t i = 0; i < n; i++)
            (void)printf("%s%s", i ? ", " : "", json_string_value(json_array_get(steps, i)));
        (void)putchar('\n');
    } else if (n)
        line("steps", "%zu: %s to %s", n, json_string_value(json_array_get(steps, 0)),
             json_string_value(json_array_get(steps, n - 1)));
}

static void put_links(const json_t *links)
{
    const char *name;
    const json_t *step;

    json_object_foreach((json_t *)links, name, step)
        line("link", "%s -> %s", name, json_string_value(step));
}

/* Print when the newest of the files that are read was saved. */
static void put_saved(const json_t *info)
{
    const time_t t = (time_t)(number_of(info, "saved_ns") / 1000000000);
    struct tm local;
    char text[32];

    if (t > 0 && localtime_r(&t, &local) &&
        strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S%z", &local))
        line("saved", "%s", text);
}

/* Print a line with the number of the names, and a line for each. */
__attribute__((format(printf, 2, 0))) static void put_names(const char *label, const char *format,
                                                            const json_t *names)
{
    const json_t *name;
    size_t i;

    if (json_array_size(names))
        line(label, format, json_array_size(names));
    json_array_foreach(names, i, name)
        line("", "%s", json_string_value(name));
}

/* Print "bfloat16, 3 float32": the dtype of most elements, then the others with the number of their
 * tensors. */
static void put_dtypes(const char *most, const json_t *counts)
{
    const char *dtype;
    json_t *n;

    (void)fputs(most, stdout);
    json_object_foreach((json_t *)counts, dtype, n)
        if (strcmp(dtype, most) != 0)
            (void)printf(", %" JSON_INTEGER_FORMAT " %s", json_integer_value(n), dtype);
}

static void put_model(const json_t *info)
{
    const json_t *architectures = json_object_get(info, "architectures");
    const char *class = json_string_value(json_array_get(architectures, 0));
    const char *type = ckpt_json_str(info, "model_type"), *recipe = ckpt_json_str(info, "recipe");

    if (!type)
        line("model", "there is no config.json");
    else
        line("model", "%s%s%s%s%s%s", class ? class : type, class ? " (" : "", class ? type : "",
             class ? ")" : "", recipe ? ", by recipe " : ", under its own names",
             recipe ? recipe : "");
    if (type && ckpt_json_str(info, "config_from"))
        line("config", "from %s", ckpt_json_str(info, "config_from"));
    put_names("base", "has %zu of the tensors:", json_object_get(info, "from_base"));
    put_names("left out", "%zu tensors that the base has not:", json_object_get(info, "left_over"));
}

static void put_weights(const json_t *info)
{
    const json_int_t tensors = number_of(info, "tensors"), files = number_of(info, "files"),
                     shards = number_of(info, "shard_files");
    const char *dtype = ckpt_json_str(info, "dtype"), *stored = ckpt_json_str(info, "stored_dtype");
    const json_t *dtypes = json_object_get(info, "dtypes"),
                 *were = json_object_get(info, "stored_dtypes");
    char count[CKPT_OUT_SIZE], size[CKPT_OUT_SIZE], disk[CKPT_OUT_SIZE];

    put_label("weights");
    (void)printf("%s parameters in %" JSON_INTEGER_FORMAT " tensor%s, %s",
                 count_text(number_of(info, "parameters"), count), tensors, plural(tensors),
                 ckpt_out_size((uint64_t)number_of(info, "bytes"), size));
    if (dtype) {
        (void)fputs(", ", stdout);
        put_dtypes(dtype, dtypes);
    }
    (void)putchar('\n');
    if (dtype && stored && !json_equal(dtypes, were)) {
        put_label("stored");
        (void)fputs("as ", stdout);
        put_dtypes(stored, were);
        (void)puts(" (dtype=stored shows that)");
    }
    line("files",
         "%" JSON_INTEGER_FORMAT " file%s, from %" JSON_INTEGER_FORMAT
         " file%s of the checkpoint with %s",
         files, plural(files), shards, plural(shards),
         ckpt_out_size((uint64_t)number_of(info, "stored_bytes"), disk));
    if (ckpt_json_str(info, "storage"))
        line("storage", "%s", ckpt_json_str(info, "storage"));
}

/* "exp_avg (F32, 4.0 KB), ...": the values of parameters besides weights, and those of other
 * tensors. */
static void put_states(const json_t *states)
{
    const char *kind, *dtype, *before = "";
    json_t *one, *n;

    if (!json_object_size(states))
        return;
    put_label("states");
    json_object_foreach((json_t *)states, kind, one) {
        char size[CKPT_OUT_SIZE];
        if (strcmp(kind, "weight") == 0)
            continue;
        (void)printf("%s%s (", before, kind);
        json_object_foreach(json_object_get(one, "dtypes"), dtype, n)
            (void)printf("%s, ", dtype);
        (void)printf("%s)", ckpt_out_size((uint64_t)number_of(one, "bytes"), size));
        before = ", ";
    }
    (void)putchar('\n');
}

void ckpt_summary_of_run(const json_t *info)
{
    const json_t *warnings = json_object_get(info, "warnings"), *warning;
    size_t i;

    line("run", "%s", ckpt_json_str(info, "run"));
    put_format(info);
    put_steps(json_object_get(info, "steps"));
    put_links(json_object_get(info, "links"));
    if (json_is_integer(json_object_get(info, "step")))
        line("step", "%" JSON_INTEGER_FORMAT, number_of(info, "step"));
    put_saved(info);
    put_model(info);
    put_weights(info);
    if (json_is_boolean(json_object_get(info, "optimizer")))
        line("optimizer", "%s", json_is_true(json_object_get(info, "optimizer")) ? "yes" : "no");
    put_states(json_object_get(info, "states"));
    if (ckpt_json_str(info, "completeness_not_checked"))
        line("complete", "not checked: %s", ckpt_json_str(info, "completeness_not_checked"));
    json_array_foreach(warnings, i, warning)
        line("warning", "%s", json_string_value(warning));
    json_array_foreach(json_object_get(info, "notes"), i, warning)
        line("note", "%s", json_string_value(warning));
}

/* ---- a tensor ---- */

enum { MOST_DIMS = 64, MOST_LETTERS = 26, MOST_ROWS = 8, MOST_COLUMNS = 32 };

struct shape {
    size_t rank;
    uint64_t dim[MOST_DIMS], stride[MOST_DIMS];
};

struct piece_box {
    uint64_t lo[MOST_DIMS], n[MOST_DIMS];
};

static bool shape_of(const json_t *list, struct shape *ret)
{
    uint64_t stride = 1;

    ret->rank = json_array_size(list);
    if (ret->rank > MOST_DIMS)
        return false;
    for (size_t d = ret->rank; d-- > 0;) {
        ret->dim[d] = (uint64_t)json_integer_value(json_array_get(list, d));
        ret->stride[d] = stride;
        stride *= ret->dim[d];
    }
    return stride > 0;
}

/* Extend the box by n steps of a stride, which may cover several dimensions. */
static bool extend(const struct shape *s, struct piece_box *b, uint64_t n, uint64_t stride)
{
    for (size_t d = s->rank; d-- > 0 && n > 1;) {
        if (s->stride[d] * b->n[d] != stride || s->dim[d] == 1)
            continue;
        const uint64_t room = s->dim[d] / b->n[d];
        const uint64_t part = n < room ? n : room;
        if (n % part != 0)
            return false;
        b->n[d] *= part;
        stride *= part;
        n /= part;
    }
    return n == 1;
}

/* The piece as a box of the tensor; false if it is none. */
static bool box_of(const struct shape *s, const json_t *piece, struct piece_box *ret)
{
    uint64_t at = (uint64_t)number_of(piece, "element");
    const json_t *axes = json_object_get(piece, "axes");

    for (size_t d = 0; d < s->rank; d++) {
        ret->lo[d] = at / s->stride[d];
        at %= s->stride[d];
        ret->n[d] = 1;
    }
    for (size_t i = json_array_size(axes); i-- > 0;) {
        const json_t *axis = json_array_get(axes, i);
        if (!extend(s, ret, (uint64_t)number_of(axis, "n"),
                    (uint64_t)number_of(axis, "element_stride")))
            return false;
    }
    for (size_t d = 0; d < s->rank; d++)
        if (ret->lo[d] + ret->n[d] > s->dim[d])
            return false;
    return true;
}

static void put_box(const struct shape *s, const struct piece_box *b)
{
    const char *between = "";

    for (size_t d = 0; d < s->rank; d++) {
        if (b->n[d] == s->dim[d])
            continue;
        const bool matrix = s->rank == 2;
        if (matrix)
            (void)printf("%s%s ", between, d ? "columns" : "rows");
        else
            (void)printf("%sdimension %zu: ", between, d);
        (void)printf("%" PRIu64 "-%" PRIu64, b->lo[d], b->lo[d] + b->n[d]);
        between = ", ";
    }
    if (!*between)
        (void)fputs("all", stdout);
}

static void put_pieces(const struct shape *s, const json_t *pieces, const struct piece_box *box,
                       const bool *known)
{
    const json_t *piece;
    size_t i;

    json_array_foreach(pieces, i, piece) {
        const bool letter = json_array_size(pieces) <= MOST_LETTERS;
        (void)printf("%c  ", letter ? 'A' + (int)i : ' ');
        if (known[i])
            put_box(s, &box[i]);
        else
            (void)printf("%" JSON_INTEGER_FORMAT " elements, not in one block",
                         number_of(piece, "elements"));
        (void)printf("  from %s at byte %" JSON_INTEGER_FORMAT "\n", ckpt_json_str(piece, "file"),
                     number_of(piece, "offset"));
    }
}

static char letter_at(const struct shape *s, const struct piece_box *box, size_t n, uint64_t row,
                      uint64_t column)
{
    for (size_t i = 0; i < n; i++)
        if (row - box[i].lo[0] < box[i].n[0] &&
            (s->rank < 2 || column - box[i].lo[1] < box[i].n[1]))
            return (char)('A' + i);
    return '.';
}

/* Draw the first two dimensions, at most 8 by 32 letters. */
static void put_picture(const struct shape *s, const struct piece_box *box, size_t n)
{
    const uint64_t rows = s->dim[0] < MOST_ROWS ? s->dim[0] : MOST_ROWS;
    const uint64_t columns = s->dim[1] < MOST_COLUMNS ? s->dim[1] : MOST_COLUMNS;

    (void)putchar('\n');
    for (uint64_t r = 0; r < rows; r++) {
        (void)fputs("   ", stdout);
        for (uint64_t c = 0; c < columns; c++)
            (void)putchar(letter_at(s, box, n, (2 * r + 1) * s->dim[0] / (2 * rows),
                                    (2 * c + 1) * s->dim[1] / (2 * columns)));
        (void)putchar('\n');
    }
}

static void put_rule(const json_t *rule)
{
    const json_t *source;
    size_t i;

    if (!json_is_object(rule))
        return;
    /* "llama/dense: rules[5].rules[1]", in the recipe's file */
    const char *where = ckpt_json_str(rule, "rule"), *at = strstr(where, ": ");
    line("recipe", "%.*s%s%s%s", at ? (int)(at - where) : (int)strlen(where), where, at ? " (" : "",
         at ? at + 2 : "", at ? ", counted from 0)" : "");
    line("", "%s", ckpt_json_str(rule, "target"));
    json_array_foreach(json_object_get(rule, "sources"), i, source)
        line("", "%s %s  %s", i ? "+" : "=", ckpt_json_str(source, "tensor"),
             ckpt_json_str(source, "pattern") ? ckpt_json_str(source, "pattern") : "");
}

static void put_head(const json_t *j)
{
    const json_t *shape = json_object_get(j, "shape"), *n;
    size_t i;

    put_label("tensor");
    (void)printf("%s: %s [", ckpt_json_str(j, "tensor"), ckpt_json_str(j, "dtype"));
    json_array_foreach(shape, i, n)
        (void)printf("%s%" JSON_INTEGER_FORMAT, i ? ", " : "", json_integer_value(n));
    (void)fputs("]\n", stdout);
    if (ckpt_json_str(j, "file"))
        line("file", "%s at byte %" JSON_INTEGER_FORMAT, ckpt_json_str(j, "file"),
             number_of(j, "file_offset"));
}

/* Print what is neither in the head nor drawn, such as how a computed tensor is made. */
static void put_rest(const json_t *j)
{
    static const char *const shown[] = {"tensor",      "dtype", "shape", "file",
                                        "file_offset", "rule",  "pieces"};
    ckpt_cleanup(ckpt_json_decrefp) json_t *rest = json_copy((json_t *)j);

    for (size_t i = 0; i < sizeof shown / sizeof *shown; i++)
        (void)json_object_del(rest, shown[i]);
    if (json_object_size(rest))
        ckpt_out_outline(rest);
}

/* A tensor's pieces as boxes. Release with drawing_release. */
struct drawing {
    const json_t *pieces;
    struct shape shape;
    size_t n, nknown; /* pieces, and those of them that are boxes */
    struct piece_box *box;
    bool *known;
};

static void drawing_release(struct drawing *d)
{
    free(d->box);
    free(d->known);
}

static bool drawing_init(struct drawing *d, const json_t *j)
{
    *d = (struct drawing){.pieces = json_object_get(j, "pieces")};
    d->n = json_array_size(d->pieces);
    d->box = calloc(d->n + 1, sizeof *d->box);
    d->known = calloc(d->n + 1, sizeof *d->known);
    if (!d->box || !d->known || !shape_of(json_object_get(j, "shape"), &d->shape))
        return false;
    for (size_t i = 0; i < d->n; i++)
        d->nknown += d->known[i] = box_of(&d->shape, json_array_get(d->pieces, i), &d->box[i]);
    return true;
}

void ckpt_summary_of_tensor(const json_t *j)
{
    ckpt_cleanup(drawing_release) struct drawing d;
    const bool drawn = drawing_init(&d, j);

    put_head(j);
    put_rule(json_object_get(j, "rule"));
    put_rest(j);
    if (drawn && d.n)
        put_pieces(&d.shape, d.pieces, d.box, d.known);
    if (drawn && d.nknown == d.n && d.n > 1 && d.n <= MOST_LETTERS && d.shape.rank >= 2)
        put_picture(&d.shape, d.box, d.n);
}

/* ---- a tensor as SVG ---- */

enum { SIDE = 640, MARGIN = 40, LINE = 18, MOST_RECTANGLES = 400, MOST_FILES = 40 };

static void put_xml(FILE *out, const char *text)
{
    for (; *text; text++) {
        const char *entity = *text == '&' ? "&amp;" : *text == '<' ? "&lt;" : NULL;
        if (entity)
            (void)fputs(entity, out);
        else
            (void)fputc(*text, out);
    }
}

static const char *colour(size_t file)
{
    static const char *const list[] = {"#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2",
                                       "#edc948", "#b07aa1", "#ff9da7", "#9c755f", "#bab0ac"};
    return list[file % (sizeof list / sizeof *list)];
}

/* The number of the file that piece i comes from, in the order of first pieces, below n files. */
static size_t number_of_file(const char **file, size_t *n, const char *name)
{
    size_t f = 0;

    while (f < *n && strcmp(file[f], name) != 0)
        f++;
    if (f == *n)
        file[(*n)++] = name;
    return f;
}

static void put_rectangle(FILE *out, const struct drawing *d, const struct piece_box *b,
                          double height, size_t file)
{
    /* a vector lies along the columns */
    const size_t column = d->shape.rank > 1;
    const bool flat = d->shape.rank == 0;
    const double dx = flat ? SIDE : (double)SIDE / (double)d->shape.dim[column];
    const double dy = column ? height / (double)d->shape.dim[0] : height;

    (void)fprintf(out,
                  "<rect x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\" fill=\"%s\" "
                  "stroke=\"white\" stroke-width=\"0.5\"/>\n",
                  MARGIN + (flat ? 0 : (double)b->lo[column] * dx),
                  MARGIN + (column ? (double)b->lo[0] * dy : 0),
                  flat ? SIDE : (double)b->n[column] * dx, column ? (double)b->n[0] * dy : height,
                  colour(file));
}

/* Draw in proportion, but no side shorter than a quarter of the other. */
static double height_of(const struct shape *s)
{
    const double h = s->rank > 1 ? SIDE * ((double)s->dim[0] / (double)s->dim[1]) : SIDE / 8.0;

    return h < SIDE / 8.0 ? SIDE / 8.0 : h > SIDE ? SIDE : h;
}

static void put_svg(FILE *out, const json_t *j, const struct drawing *d, const char **file)
{
    const double height = height_of(&d->shape);
    const size_t n = d->n < MOST_RECTANGLES ? d->n : MOST_RECTANGLES;
    ckpt_cleanup(ckpt_freep) char *dims = ckpt_out_numbers(d->shape.dim, d->shape.rank, " x ");
    size_t nfile = 0;

    for (size_t i = 0; i < n; i++)
        (void)number_of_file(file, &nfile, ckpt_json_str(json_array_get(d->pieces, i), "file"));
    const size_t nline = nfile < MOST_FILES ? nfile : MOST_FILES;
    (void)fprintf(out,
                  "<svg xmlns=\"http://www.w3.org/2000/svg\" version=\"1.1\" width=\"%d\" "
                  "height=\"%.0f\" font-family=\"sans-serif\" font-size=\"12\">\n"
                  "<text x=\"%d\" y=\"24\" font-size=\"14\">",
                  SIDE + 2 * MARGIN, height + 2.0 * MARGIN + (double)(nline + 2) * LINE, MARGIN);
    put_xml(out, ckpt_json_str(j, "tensor"));
    (void)fprintf(out, ": %s, %s</text>\n", ckpt_json_str(j, "dtype"), dims ? dims : "");
    for (size_t i = 0; i < n; i++)
        if (d->known[i])
            put_rectangle(
                out, d, &d->box[i], height,
                number_of_file(file, &nfile, ckpt_json_str(json_array_get(d->pieces, i), "file")));
    double y = height + MARGIN + 2 * LINE;
    for (size_t f = 0; f < nline; f++, y += LINE) {
        (void)fprintf(out,
                      "<rect x=\"%d\" y=\"%.0f\" width=\"12\" height=\"12\" fill=\"%s\"/>"
                      "<text x=\"%d\" y=\"%.0f\">",
                      MARGIN, y - 11, colour(f), MARGIN + LINE, y);
        put_xml(out, file[f]);
        (void)fputs("</text>\n", out);
    }
    if (d->nknown < d->n || nline < nfile || n < d->n)
        (void)fprintf(out,
                      "<text x=\"%d\" y=\"%.0f\">drawn: %zu of %zu parts, of which %zu are no "
                      "blocks; named: %zu of %zu files</text>\n",
                      MARGIN, y, n, d->n, d->n - d->nknown, nline, nfile);
    (void)fputs("</svg>\n", out);
}

int ckpt_summary_to_svg(const json_t *j, const char *path, struct ckpt_err *err)
{
    ckpt_cleanup(drawing_release) struct drawing d;
    const bool drawn = drawing_init(&d, j);
    ckpt_cleanup(ckpt_freep) const char **file = calloc(d.n + 1, sizeof *file);

    if (!file || !d.box || !d.known)
        return ckpt_nomem(err);
    if (!drawn || d.nknown == 0)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "--svg: '%s' has no blocks to draw: it is empty, or computed from several "
                         "tensors",
                         ckpt_json_str(j, "tensor"));
    FILE *out = fopen(path, "we");
    if (!out)
        return ckpt_fail_errno(err, errno, "%s", path);
    put_svg(out, j, &d, file);
    const bool bad = ferror(out);
    return fclose(out) != 0 || bad ? ckpt_fail_errno(err, errno, "%s", path) : 0;
}

/* ---- a plan ---- */

static void put_rates(const json_t *rates)
{
    const char *key, *between = "";
    json_t *value;

    put_label("rates");
    json_object_foreach((json_t *)rates, key, value) {
        const double n = json_number_value(value);
        char text[CKPT_OUT_SIZE];
        (void)printf("%s%s %s", between, key, n > 0 ? ckpt_out_size((uint64_t)n, text) : "none");
        between = ", ";
    }
    (void)fputs(" a second\n", stdout);
}

/* Print a table of what the rank with the least, an average one and the one with the most have. */
static void put_spreads(const json_t *plan)
{
    static const char *const key[] = {"read_bytes", "sent_bytes", "received_bytes", "asked_bytes"};
    static const char *const name[] = {"read", "sent", "received", "asked"};
    static const char *const part[] = {"least", "mean", "most"};
    static const char *const head[] = {"by a rank", "least", "mean", "most"};
    enum { ROWS = 5, COLUMNS = 4 };
    char text[ROWS][COLUMNS][CKPT_OUT_SIZE], *cell[ROWS * COLUMNS];
    const size_t rows = json_object_get(plan, "asked_bytes") ? ROWS : ROWS - 1;

    for (size_t r = 0; r < rows; r++) {
        const json_t *row = json_object_get(plan, r ? key[r - 1] : "reads");
        (void)snprintf(text[r][0], CKPT_OUT_SIZE, "%s", r ? name[r - 1] : "reads");
        for (size_t c = 1; c < COLUMNS; c++) {
            const json_int_t n = number_of(row, part[c - 1]);
            if (r)
                (void)ckpt_out_size((uint64_t)n, text[r][c]);
            else
                (void)snprintf(text[r][c], CKPT_OUT_SIZE, "%" JSON_INTEGER_FORMAT, n);
        }
        for (size_t c = 0; c < COLUMNS; c++)
            cell[r * COLUMNS + c] = text[r][c];
    }
    ckpt_out_table(head, "lrrr", COLUMNS, cell, rows * COLUMNS);
}

/* Print what the ranks of each node read of its own files, unless they read nothing. */
static void put_nodes(const json_t *nodes)
{
    const json_t *n;
    size_t i;

    json_array_foreach(nodes, i, n) {
        char read[CKPT_OUT_SIZE], asked[CKPT_OUT_SIZE];
        if (number_of(n, "read_bytes") == 0 && number_of(n, "asked_bytes") == 0)
            continue;
        line("node",
             "%" JSON_INTEGER_FORMAT ": reads %s of its files for all, asks other nodes for %s",
             number_of(n, "node"), ckpt_out_size((uint64_t)number_of(n, "read_bytes"), read),
             ckpt_out_size((uint64_t)number_of(n, "asked_bytes"), asked));
    }
}

/* Print how the rank that exchanges most does so, a line for each group and step. */
static void put_exchanges(const json_t *exchanges)
{
    const json_t *x;
    size_t i;

    json_array_foreach(exchanges, i, x) {
        char bytes[CKPT_OUT_SIZE];
        line("exchange",
             "%s of %" JSON_INTEGER_FORMAT " ranks on %" JSON_INTEGER_FORMAT
             " node%s: %" JSON_INTEGER_FORMAT " window%s of %s",
             ckpt_json_str(x, "call"), number_of(x, "members"), number_of(x, "nodes"),
             plural(number_of(x, "nodes")), number_of(x, "windows"),
             plural(number_of(x, "windows")),
             ckpt_out_size((uint64_t)number_of(x, "window_bytes"), bytes));
    }
}

void ckpt_summary_of_plan(const json_t *plan, bool multiplied)
{
    const json_t *seconds = json_object_get(plan, "modelled_s");
    const json_int_t nodes = number_of(plan, "nodes");
    char unique[CKPT_OUT_SIZE], needed[CKPT_OUT_SIZE];

    line("layout", "%s: %" JSON_INTEGER_FORMAT " rank%s on %" JSON_INTEGER_FORMAT " node%s%s",
         ckpt_json_str(plan, "layout"), number_of(plan, "ranks"), plural(number_of(plan, "ranks")),
         nodes, plural(nodes), multiplied ? " (the product of the layout's numbers)" : "");
    line("readers", "%s", ckpt_json_str(plan, "readers"));
    line("bytes", "%s of the checkpoint, %s in all ranks together",
         ckpt_out_size((uint64_t)number_of(plan, "unique_bytes"), unique),
         ckpt_out_size((uint64_t)number_of(plan, "needed_bytes"), needed));
    line("seconds", "each %.3g, node %.3g, once %.3g (an estimate, by the rates below)",
         json_number_value(json_object_get(seconds, "each")),
         json_number_value(json_object_get(seconds, "node")),
         json_number_value(json_object_get(seconds, "once")));
    put_rates(json_object_get(plan, "rates"));
    put_exchanges(json_object_get(plan, "exchanges"));
    put_nodes(json_object_get(plan, "by_node"));
    (void)putchar('\n');
    put_spreads(plan);
}
