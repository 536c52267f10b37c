/* SPDX-License-Identifier: Apache-2.0 */
/* Converting arbitrary bytes to a JSON string. */
#include "json_text.h"

#include "base/mem.h"
#include "base/str.h"

json_t *ckptfs_json_text(const char *bytes)
{
    ckpt_cleanup(ckpt_freep) char *shown = NULL;
    json_t *plain = json_string(bytes);

    return plain || !(shown = ckpt_printable(bytes)) ? plain : json_string(shown);
}
