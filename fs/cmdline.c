/* SPDX-License-Identifier: Apache-2.0 */
/* Parsing command lines, and printing help, by the table of options. The parser is not getopt or
 * argp because the words are not a closed list: the keys of models, which only the library knows,
 * and the words of mount(8) are options, too. */
#include "cmdline.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/str.h"

enum { HELP_COLUMN = 24, HELP_WIDTH = 80 };

/* ---- lists of options: word=value,... ---- */

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

/* ---- help ---- */

/* Print a text beside what has been printed of its line, which is so many columns wide. */
static void print_wrapped(const char *text, int column)
{
    int at = HELP_COLUMN;

    if (column + 2 > HELP_COLUMN) {
        (void)printf("\n");
        column = 0;
    }
    (void)printf("%*s", HELP_COLUMN - column, "");
    while (*text) {
        const int len = (int)strcspn(text, " ");
        if (at > HELP_COLUMN && at + 1 + len > HELP_WIDTH) {
            (void)printf("\n%*s", HELP_COLUMN, "");
            at = HELP_COLUMN;
        }
        at += printf("%s%.*s", at > HELP_COLUMN ? " " : "", len, text);
        text += len + (text[len] == ' ');
    }
    (void)printf("\n");
}

static void print_option(char letter, const char *word, const char *between, const char *value,
                         const char *help)
{
    const char shown[] = {letter ? '-' : ' ', letter ? letter : ' ', letter ? ',' : ' ', '\0'};

    print_wrapped(help,
                  printf("  %s --%s%s%s", shown, word, value ? between : "", value ? value : ""));
}

/* Words are equal if they differ in '-' and '_' only. */
static bool same_word(const char *a, const char *b)
{
    while (*a && ckpt_option_same_letter(*a, *b))
        a++, b++;
    return *a == *b;
}

/* The option of these commands that has the word or, if word is NULL, the letter. */
static const struct ckpt_option *find(uint32_t of, const char *word, char letter)
{
    for (size_t i = 0; i < ckptfs_noptions; i++) {
        const struct ckpt_option *o = &ckptfs_options[i];
        if (((o->of | o->refused_by) & of) &&
            (word ? same_word(o->word, word) : o->letter == letter))
            return o;
    }
    return NULL;
}

/* The topics of the library's options, and the commands whose help has them. */
static const struct {
    enum ckpt_option_topic topic;
    uint32_t of;
    const char *heading;
} topics[] = {
    {CKPT_TOPIC_MODEL, CKPTFS_MOUNT | CKPTFS_TOOL, "What is shown of the checkpoint"},
    {CKPT_TOPIC_FORMAT, CKPTFS_FILES, "Views in a training framework's format (--view)"},
    {CKPT_TOPIC_BUCKET, CKPTFS_MOUNT | CKPTFS_TOOL,
     "Runs in a bucket, or on storage at a distance"},
};

/* Print the options of the library that these commands obey. */
static void print_topics(uint32_t of)
{
    const char *word, *value, *help;

    for (size_t k = 0; k < sizeof topics / sizeof *topics; k++) {
        if (!(topics[k].of & of))
            continue;
        (void)printf("\n%s:\n", topics[k].heading);
        for (size_t i = 0; (word = ckpt_options_word(i, &value, &help)); i++)
            if (ckpt_options_topic(i) == topics[k].topic &&
                !((of & (of - 1)) == 0 && find(of, word, 0)))
                print_option(0, word, "=", value, help);
        if (topics[k].topic == CKPT_TOPIC_MODEL)
            print_option(0, "KEY", "=", "NUMBER",
                         "a number of the model, by its key in config.json");
        if (topics[k].topic == CKPT_TOPIC_BUCKET)
            (void)printf(
                "A run in a bucket is s3://BUCKET/PREFIX; endpoint, region and credentials are "
                "those of\nAWS's tools (AWS_...).\n");
    }
}

static void print_help(const struct ckptfs_command *command)
{
    (void)printf("usage: %s %s [option...]\n%s.\n\n", command->name, command->operands,
                 command->help);
    for (size_t i = 0; i < ckptfs_noptions; i++) {
        const struct ckpt_option *o = &ckptfs_options[i];
        if ((o->of & command->bit) && o->help)
            print_option(o->letter, o->word, o->takes_rest ? " " : "=", o->value, o->help);
    }
    print_topics(command->bit);
    (void)printf("\n%s", command->more ? command->more : "");
    if (!(command->bit & CKPTFS_FILES))
        (void)printf("ckpt help options lists the options of all commands.\n");
    (void)printf("Exit status: 0 good, 1 failed or different, 2 usage.\n");
}

/* The last word of a command's name: "info" of "ckpt info". */
static const char *short_name(const struct ckptfs_command *k)
{
    const char *space = strchr(k->name, ' ');

    return space ? space + 1 : k->name;
}

/* Print the options of all these commands, each with the commands that take it. */
static void print_options(uint32_t of)
{
    (void)printf("The options of ckpt's commands:\n");
    for (size_t i = 0; i < ckptfs_noptions; i++) {
        const struct ckpt_option *o = &ckptfs_options[i];
        const char *between = " [";
        if (!(o->of & of) || !o->help)
            continue;
        ckpt_cleanup(ckpt_str_release) struct ckpt_str help = {0};
        ckpt_str_puts(&help, o->help);
        for (const struct ckptfs_command *c = ckptfs_commands; c->bit && (o->of & of) != of; c++)
            if (c->bit & of & o->of) {
                ckpt_str_printf(&help, "%s%s", between, short_name(c));
                between = ", ";
            }
        ckpt_str_puts(&help, *between == ',' ? "]" : "");
        print_option(o->letter, o->word, o->takes_rest ? " " : "=", o->value,
                     help.failed ? o->help : ckpt_str_get(&help));
    }
    print_topics(of);
}

static void print_commands(uint32_t of)
{
    (void)printf("usage: ckpt COMMAND RUN [...] [option...]\n\n");
    for (const struct ckptfs_command *c = ckptfs_commands; c->bit; c++)
        if (c->bit & of)
            print_wrapped(c->help, printf("  %s %s", c->name, c->operands));
    (void)printf("\nckpt COMMAND --help lists the options of a command, ckpt help options those of "
                 "all.\n"
                 "Exit status: 0 good, 1 failed or different, 2 usage.\n");
}

/* ---- what is wrong ---- */

/* A clause that says what is meant by another program's word for an option, or for what is no
 * option of these commands. The caller frees it; NULL: the word is not known, or memory ran out. */
static char *meaning(uint32_t of, const char *word)
{
    ckpt_cleanup(ckpt_freep) char *meant = NULL;

    for (size_t i = 0; i < ckptfs_noptions && !meant; i++)
        if (ckptfs_options[i].of & of)
            meant = ckpt_option_meant(&ckptfs_options[i], word);
    for (const struct ckptfs_hint *h = ckptfs_hints; h->of && !meant; h++)
        if ((h->of & of) && ckpt_words_find(h->words, word))
            return ckpt_asprintf("%s", h->text);
    if (!meant)
        meant = ckpt_options_meant(word);
    return meant ? ckpt_asprintf("did you mean --%s", meant) : NULL;
}

/* Such a clause about an option that resembles the word. */
static char *resemblance(uint32_t of, const char *word)
{
    const char *known, *value, *help;
    struct ckpt_near near = {0};

    for (size_t i = 0; i < ckptfs_noptions; i++)
        if (ckptfs_options[i].of & of)
            ckpt_near_consider(&near, word, ckptfs_options[i].word);
    for (size_t i = 0; (known = ckpt_options_word(i, &value, &help)); i++)
        ckpt_near_consider(&near, word, known);
    return near.word ? ckpt_asprintf("did you mean --%s", near.word) : NULL;
}

static uint32_t commands_of(const struct ckptfs_cmdline *c)
{
    return c->command ? c->command->bit : c->of;
}

static int fail_unknown(const struct ckptfs_cmdline *c, const char *word, bool is_list,
                        const char *value, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *advice = meaning(commands_of(c), word);

    if (!advice)
        advice = resemblance(c->of, word);
    if (!advice && is_list && !value && strpbrk(word, "./"))
        advice = strdup("-o is followed by options, WORD=VALUE,..., and not by a file");
    return ckpt_fail(err, CKPT_USAGE, "option %s: no such option%s%s (--help lists them)", word,
                     advice ? "; " : "", advice ? advice : "");
}

static int fail_letter(const struct ckptfs_cmdline *c, char letter, struct ckpt_err *err)
{
    const char word[] = {letter, '\0'};
    ckpt_cleanup(ckpt_freep) char *advice = meaning(commands_of(c), word);

    return ckpt_fail(err, CKPT_USAGE, "-%c: no such option%s%s (--help lists them)", letter,
                     advice ? "; " : "", advice ? advice : "");
}

static int fail_command(const struct ckptfs_cmdline *c, const char *name, struct ckpt_err *err)
{
    const char *meant = NULL;
    struct ckpt_near near = {0};

    for (const struct ckptfs_command *k = ckptfs_commands; k->bit; k++) {
        if (k->bit & c->of)
            ckpt_near_consider(&near, name, short_name(k));
        if (ckpt_words_find(k->also, name))
            meant = k->bit & c->of ? short_name(k) : k->name;
    }
    if (!meant)
        meant = near.word;
    return ckpt_fail(err, CKPT_USAGE, "%s: no such command%s%s (--help lists them)", name,
                     meant ? "; did you mean " : "", meant ? meant : "");
}

/* Fail because the command does not take the option. */
static int fail_useless(const struct ckptfs_cmdline *c, const struct ckpt_option *o,
                        struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str takers = {0};
    ckpt_cleanup(ckpt_freep) char *advice = meaning(c->command->bit, o->word);

    if (o->refused_by & c->command->bit)
        return ckpt_fail(err, CKPT_USAGE, "--%s does not apply to %s: %s", o->word,
                         c->command->name, o->why);
    for (const struct ckptfs_command *k = ckptfs_commands; k->bit; k++)
        if (k->bit & o->of)
            ckpt_str_printf(&takers, "%s%s", takers.len ? ", " : "", k->name);
    return ckpt_fail(err, CKPT_USAGE, "--%s does not apply to %s: it is an option of %s%s%s",
                     o->word, c->command->name, ckpt_str_get(&takers), advice ? "; " : "",
                     advice ? advice : "");
}

/* Fail because of the option's value, which may be one of another option with that word elsewhere.
 */
static int fail_value(const struct ckptfs_cmdline *c, const struct ckpt_option *o,
                      const struct ckpt_err *own, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *advice = meaning(c->command->bit, o->word);

    return advice ? ckpt_fail(err, own->code, "%s; %s", own->text, advice)
                  : ckpt_err_move(err, own);
}

/* ---- parsing ---- */

/* Does an option have a value, which may be the argument that follows it? */
static bool wants_value(const struct ckptfs_cmdline *c, const char *word)
{
    const struct ckpt_option *o = find(c->of, word, 0);
    const char *known, *value, *help;

    if (o)
        return o->value;
    for (size_t i = 0; (known = ckpt_options_word(i, &value, &help)); i++)
        if (strcmp(known, word) == 0)
            return value;
    return ckpt_options_knows(word);
}

static int set_list(struct ckptfs_cmdline *c, const char *list, struct ckpt_err *err);

static int set_row(struct ckptfs_cmdline *c, const struct ckpt_option *o, const char *value,
                   struct ckpt_err *err)
{
    struct ckpt_err own = {0};

    c->help |= o->letter == 'h';
    c->version |= o->letter == 'V';
    if (!c->command || o->letter == 'h' || o->letter == 'V')
        return 0;
    if (!(o->of & c->command->bit))
        return fail_useless(c, o, err);
    if (o->takes_rest)
        return 0;
    if (o->letter == 'o')
        return set_list(c, value, err);
    return ckpt_option_set(o, c->into, value, &own) < 0 ? fail_value(c, o, &own, err) : 0;
}

/* Set an option by its word. A list has words of the library, and of the mount. */
static int set_word(struct ckptfs_cmdline *c, const char *word, const char *value, bool is_list,
                    struct ckpt_err *err)
{
    const uint32_t own = commands_of(c);
    const struct ckpt_option *o = find(is_list ? own & CKPTFS_MOUNT : own, word, 0);

    if (o)
        return set_row(c, o, value, err);
    if (!c->command)
        return 0;
    if (ckpt_options_knows(word))
        return ckpt_options_set(c->opt, word, value, err);
    const int taken = c->other ? c->other(c->into, word, value, err) : 0;
    if (taken)
        return taken < 0 ? -1 : 0;
    o = is_list ? NULL : find(c->of, word, 0);
    return o ? fail_useless(c, o, err) : fail_unknown(c, word, is_list, value, err);
}

static int set_list(struct ckptfs_cmdline *c, const char *list, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *copy = strdup(list);
    char *rest = copy, *word, *value;

    if (!copy)
        return ckpt_nomem(err);
    while (ckptfs_next_option(&rest, &word, &value))
        if (set_word(c, word, value, true, err) < 0)
            return -1;
    return 0;
}

/* Take an option --word, and the argument after it if that is its value. */
static int take_long(struct ckptfs_cmdline *c, char ***arg, struct ckpt_err *err)
{
    const char *given = **arg;
    ckpt_cleanup(ckpt_freep) char *word = strdup(given + 2);

    if (!word)
        return ckpt_nomem(err);
    char *value = strchr(word, '=');
    if (value)
        *value++ = '\0';
    for (char *p = word; *p; p++)
        *p = *p == '-' ? '_' : *p;
    if (!value && wants_value(c, word) && !(value = *++*arg))
        return ckpt_fail(err, CKPT_USAGE, "%s needs a value", given);
    const struct ckpt_option *o = find(c->of, word, 0);
    if (o && o->takes_rest) {
        if (value != **arg)
            return ckpt_fail(err, CKPT_USAGE, "write --%s %s, last on the line", o->word, o->value);
        for (c->rest = *arg; (*arg)[1]; ++*arg)
            continue;
    }
    return set_word(c, word, value, false, err);
}

/* Take options of one letter each, "-fd", of which the last may have a value: "-obase=X", "-o
 * base=X". */
static int take_letters(struct ckptfs_cmdline *c, char ***arg, struct ckpt_err *err)
{
    for (const char *letter = **arg + 1; *letter; letter++) {
        const struct ckpt_option *o = find(c->of, NULL, *letter);
        const char *value = letter[1] ? letter + 1 : NULL;
        if (!o)
            return fail_letter(c, *letter, err);
        if (o->value && !value && !(value = *++*arg))
            return ckpt_fail(err, CKPT_USAGE, "-%c needs a value", *letter);
        if (set_row(c, o, o->value ? value : NULL, err) < 0)
            return -1;
        if (o->value)
            break;
    }
    return 0;
}

/* Has the program several commands, of which the first operand names one? */
static bool has_commands(const struct ckptfs_cmdline *c) { return c->of & (c->of - 1); }

/* "help" and "help COMMAND" are what git's users type. */
static void take_help_word(struct ckptfs_cmdline *c)
{
    if (!has_commands(c) || !c->noperand || strcmp(c->operand[0], "help") != 0)
        return;
    c->help = true;
    memmove(c->operand, c->operand + 1, c->noperand * sizeof *c->operand);
    c->noperand--;
}

static int find_command(struct ckptfs_cmdline *c, struct ckpt_err *err)
{
    take_help_word(c);
    if (c->help && has_commands(c) && c->noperand == 1 && strcmp(c->operand[0], "options") == 0)
        return 0;
    for (const struct ckptfs_command *k = ckptfs_commands; k->bit; k++)
        if ((k->bit & c->of) &&
            (!has_commands(c) || (c->noperand && strcmp(short_name(k), c->operand[0]) == 0)))
            c->command = k;
    if (!c->command && c->noperand)
        return fail_command(c, c->operand[0], err);
    return c->command || c->help || c->version
               ? 0
               : ckpt_fail(err, CKPT_USAGE, "no command (--help lists them)");
}

static int check_operands(const struct ckptfs_cmdline *c, struct ckpt_err *err)
{
    size_t n = 1 + has_commands(c);

    for (const char *p = c->command->operands; (p = strchr(p, ' ')); p++)
        n++;
    if (c->noperand == n)
        return 0;
    return ckpt_fail(err, CKPT_USAGE, "%s arguments: usage: %s %s [option...]",
                     c->noperand < n ? "missing" : "too many", c->command->name,
                     c->command->operands);
}

/* Take all arguments: first, while the command is not known, the operands, and then the options. */
static int take(struct ckptfs_cmdline *c, char **argv, struct ckpt_err *err)
{
    bool options = true; /* until "--" */
    int rc = 0;

    c->noperand = 0;
    for (char **arg = argv + (*argv != NULL); rc == 0 && *arg; arg++) {
        if (!options || (*arg)[0] != '-' || !(*arg)[1])
            c->operand[c->noperand++] = *arg;
        else if ((*arg)[1] != '-')
            rc = take_letters(c, &arg, err);
        else if ((*arg)[2])
            rc = take_long(c, &arg, err);
        else
            options = false;
    }
    return rc;
}

int ckptfs_cmdline_parse(struct ckptfs_cmdline *c, char **argv, struct ckpt_err *err)
{
    size_t n = 0;

    while (argv[n])
        n++;
    if (!(c->operand = calloc(n + 1, sizeof *c->operand)))
        return ckpt_nomem(err);
    if (take(c, argv, err) < 0 || find_command(c, err) < 0)
        return -1;
    if (c->help && c->command)
        print_help(c->command);
    else if (c->help && c->noperand)
        print_options(c->of);
    else if (c->help)
        print_commands(c->of);
    if (c->help || c->version) {
        c->command = NULL;
        return 0;
    }
    return take(c, argv, err) < 0 ? -1 : check_operands(c, err);
}

void ckptfs_cmdline_release(struct ckptfs_cmdline *c) { free(c->operand); }
