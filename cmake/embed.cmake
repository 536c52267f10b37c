# SPDX-License-Identifier: Apache-2.0
# Writes OUT, a C file with every *.json below ROOT (core/recipe/data) as ckpt_recipe_blobs: cmake -DROOT=... -DOUT=... -P embed.cmake
file(GLOB_RECURSE files RELATIVE ${ROOT} ${ROOT}/*.json)
list(SORT files)
set(data "")
set(table "")
set(n 0)
foreach(file IN LISTS files)
  file(READ ${ROOT}/${file} hex HEX)
  string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${hex}")
  string(REPLACE "0x0a," "0x0a,\n" bytes "${bytes}")
  string(REGEX REPLACE "\\.json$" "" name ${file})
  string(APPEND data "static const unsigned char blob_${n}[] = {\n${bytes}0};\n")
  string(APPEND table "    {\"${name}\", blob_${n}, sizeof blob_${n} - 1},\n")
  math(EXPR n "${n} + 1")
endforeach()
file(WRITE ${OUT} "/* Made by cmake/embed.cmake from core/recipe/data. */
#include \"recipe/library/recipes.h\"

${data}
const struct ckpt_recipe_blob ckpt_recipe_blobs[] = {
${table}    {0}};
const size_t ckpt_recipe_nblobs = ${n};
")
