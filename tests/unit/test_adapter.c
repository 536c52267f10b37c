/* SPDX-License-Identifier: Apache-2.0 */
/* Keys of PeftModels' state dicts, as trainers save them, and the names that PEFT gives them. */
#include "model/adapter.h"

#include "base/json.h"
#include "small_catalog.h"

/* The names that are left, in order, with blanks between; "" if no adapter is found. A static
 * buffer. */
static const char *names_of(const char *const *in, struct ckpt_err *err)
{
    static char text[2000];
    struct small_catalog c = small_catalog_new();
    const struct ckpt_type type = {0};
    struct ckpt_facts facts = {0};
    bool found;

    text[0] = '\0';
    for (; *in; in++)
        (void)small_add(&c, *in, CKPT_F32, 2, 0);
    if (ckpt_adapter_apply(c.cat, &type, false, &facts, &found, err) < 0) {
        (void)snprintf(text, sizeof text, "error");
    } else if (found) {
        for (size_t i = 0; i < c.cat->tensors.len; i++)
            (void)snprintf(text + strlen(text), sizeof text - strlen(text), "%s%s", i ? " " : "",
                           c.cat->tensors.ptr[i].name);
        assert_true(facts.is_adapter && facts.names == CKPT_NAMES_HUB);
        assert_int_equal(facts.weight_map->tensors.len, c.cat->tensors.len);
    }
    ckpt_facts_release(&facts);
    small_catalog_free(&c);
    return text;
}

#define Q "base_model.model.model.layers.0.self_attn.q_proj."

TEST(adapter, names_are_those_that_peft_saves)
{
    static const struct {
        const char *in[6], *out;
    } cases[] = {
        {{"model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"}, ""},
        {{"model." Q "lora_A.weight", "model." Q "lora_B.weight"},
         Q "lora_A.weight " Q "lora_B.weight"},
        {{Q "lora_A.default.weight", Q "lora_B.default.weight",
          "optimizer.state." Q "lora_A.default.weight"},
         Q "lora_A.weight " Q "lora_B.weight"},
        {{"state_dict.net." Q "lora_B.my_adapter.bias"}, Q "lora_B.bias"},
        {{"_fsdp_wrapped_module." Q "lora_A.default.weight"}, Q "lora_A.weight"},
        {{"_orig_mod." Q "lora_A.default.weight"}, Q "lora_A.weight"},
        {{Q "lora_magnitude_vector.default.weight"}, Q "lora_magnitude_vector"},
        {{Q "lora_magnitude_vector"}, Q "lora_magnitude_vector"},
        {{"base_model.model.model.embed_tokens.lora_embedding_A.default",
          "base_model.model.model.embed_tokens.lora_embedding_B"},
         "base_model.model.model.embed_tokens.lora_embedding_A "
         "base_model.model.model.embed_tokens.lora_embedding_B"},
        /* experts: two wrappers, no weight of the base */
        {{"base_model.model.l.experts.base_layer.lora_A.default.weight",
          "base_model.model.l.experts.lora_A.default.weight", "base_model.model.lm_head.weight"},
         "base_model.model.l.experts.base_layer.lora_A.weight "
         "base_model.model.l.experts.lora_A.weight base_model.model.lm_head.weight"},
        /* a whole state dict */
        {{Q "base_layer.weight", Q "lora_A.default.weight", "base_model.model.lm_head.weight"},
         Q "lora_A.weight"},
        {{"base_model.model.lm_head.original_module.weight", Q "lora_A.default.weight",
          "base_model.model.lm_head.modules_to_save.default.weight",
          "base_model.model.model.norm.weight"},
         Q "lora_A.weight base_model.model.lm_head.weight"},
    };

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct ckpt_err err = {0};
        CHECK_STR(names_of(cases[i].in, &err), cases[i].out);
    }
}

TEST(adapter, keys_that_are_not_peft_s_and_two_adapters_are_refused)
{
    static const char *const bare[] = {"model.layers.0.q_proj.lora_A.weight", NULL};
    static const char *const two[] = {Q "lora_A.one.weight", Q "lora_A.two.weight", NULL};
    struct ckpt_err err = {0};

    CHECK_STR(names_of(bare, &err), "error");
    CHECK(err.code == CKPT_UNSUPPORTED && strstr(err.text, bare[0]));
    memset(&err, 0, sizeof err);
    CHECK_STR(names_of(two, &err), "error");
    CHECK(err.code == CKPT_CONFLICT);
}

TESTS(T(adapter, names_are_those_that_peft_saves),
      T(adapter, keys_that_are_not_peft_s_and_two_adapters_are_refused))
