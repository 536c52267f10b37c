/* SPDX-License-Identifier: Apache-2.0 */
/* Models of a type whose tensors nobody has listed: which of their names show that config.json is
 * theirs. */
#include <ckptfs/ckptfs.h>

#include "base/err.h"
#include "test.h"
#include "tree.h"

/* Opens a model directory of one tensor with this name. */
static int open_model(const char *config, const char *name, struct ckpt_err *err)
{
    struct ckpt_run *run = NULL;
    struct ckpt_view *view = NULL;
    char header[512];
    struct tree t;

    tree_open(&t);
    (void)snprintf(header, sizeof header,
                   "{\"%s\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", name);
    tree_text(&t, "config.json", config);
    tree_st(&t, "model.safetensors", header, 4);
    int rc = ckpt_run_open(t.path, NULL, &run, err);
    if (rc == 0 && (rc = ckpt_run_view(run, NULL, &view, err)) == 0)
        ckpt_view_release(view);
    if (run)
        ckpt_run_close(run);
    tree_close(&t);
    return rc;
}

TEST(complete, a_word_of_a_name_shows_that_the_config_is_the_model_s)
{
    static const char plain[] = "{\"model_type\":\"clip\"}",
                      parts[] = "{\"model_type\":\"clip\",\"audio_config\":{},\"x_config\":1}",
                      two[] = "{\"model_type\":\"clip\",\"is_encoder_decoder\":true}";
    static const struct {
        const char *config, *name;
        bool is_one;
    } each[] = {
        /* clip's first module is text_model: the whole word, anywhere in the name */
        {plain, "text_model.a.weight", true},
        {plain, "a.text_model.weight", true},
        {plain, "a.text_model", true},
        {plain, "text_models.a.weight", false},
        {plain, "a.text_model_b", false},
        {plain, "my_text_model.a.weight", false},
        {plain, "a.my_text_model.weight", false},
        {plain, "text.model", false},
        /* a part that has a config of its own: words that begin like it */
        {parts, "audio_tower.a.weight", true},
        {parts, "a.audio.weight", true},
        {parts, "a.audi.weight", false},
        {parts, "a.my_audio.weight", false},
        {parts, "x.weight", false},
        {plain, "audio_tower.a.weight", false},
        /* the halves of what its config calls an encoder and a decoder */
        {two, "a.encoder.weight", true},
        {two, "encoder_b.weight", true},
        {two, "decoder_b.weight", true},
        {two, "a.coder.weight", false},
        {plain, "a.encoder.weight", false},
        {plain, "decoder_b.weight", false},
    };
    struct ckpt_err err = {0};

    for (size_t i = 0; i < sizeof each / sizeof *each; i++)
        if (each[i].is_one)
            CHECK_OK(open_model(each[i].config, each[i].name, &err));
        else
            CHECK_FAILS(open_model(each[i].config, each[i].name, &err), CKPT_MISSING,
                        "has none of the tensors of the model that config.json describes "
                        "(model_type 'clip'); its first is '");
}

TESTS(T(complete, a_word_of_a_name_shows_that_the_config_is_the_model_s))
