# SPDX-License-Identifier: Apache-2.0
# bash completion for ckptfs and ckpt: of what their --help lists.

# The options that --help lists, "--word" or "--word=VALUE", one a line.
_ckpt_options() {
    "$@" --help 2>/dev/null | sed -nE 's/^  (-.,|   ) (--[a-z][a-z_-]*(=[^ ]*)?).*/\2/p'
}

# Complete the value of --$1, of which $2 is typed: one of the words of --help, or a file.
_ckpt_value() {
    local value
    value=$(sed -n "s/^--$1=//p" <<<"$options")
    case $value in
    *DIR* | *FILE*)
        compopt -o nospace -o filenames 2>/dev/null
        mapfile -t COMPREPLY < <(compgen -f -- "$2")
        ;;
    *[a-z]\|*) mapfile -t COMPREPLY < <(compgen -W "${value//|/ }" -- "$2") ;;
    esac
}

# Complete the last word of a comma-separated -o list. Replies replace what follows the last '=', as readline sees words.
_ckpt_list() {
    local last=${1##*,} begun=${1##*=} word
    if [[ $last == *=* ]]; then
        _ckpt_value "${last%%=*}" "${last#*=}"
        return
    fi
    compopt -o nospace 2>/dev/null
    for word in $(sed -E 's/^--//; s/=.*/=/' <<<"$options"); do
        [[ $word == "$last"* ]] && COMPREPLY+=("${begun%"$last"}$word")
    done
}

_ckpt_complete() {
    local line=${COMP_LINE:0:COMP_POINT} cur prev words i options command=("$1") run=
    # The token being typed and the ones before it. Not COMP_WORDS: readline splits that at '='.
    cur=${line##*[[:space:]]}
    read -ra words <<<"${line%"$cur"}"
    prev=${words[-1]}
    COMPREPLY=()
    for ((i = 1; i < ${#words[@]}; i++)); do
        case ${words[i]} in
        -o | --step | --steps | --other-step | --other-option | --tolerance | --jobs) ((i++)) ;;
        -*) ;;
        *)
            if [[ ${1##*/} == ckpt && ${#command[@]} == 1 ]]; then
                command+=("${words[i]}")
            elif [[ -z $run ]]; then
                run=${words[i]}
            fi
            ;;
        esac
    done
    if [[ ${1##*/} == ckpt && ${#command[@]} == 1 && $cur != -* ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$("$1" --help 2>/dev/null | sed -nE 's/^  ckpt ([a-z]+) .*/\1/p')" -- "$cur")
        return
    fi
    options=$(_ckpt_options "${command[@]}")
    if [[ $prev == -o ]]; then
        _ckpt_list "$cur"
    elif [[ $prev == --step ]]; then
        [[ -d $run ]] && mapfile -t COMPREPLY < <(cd -- "$run" && compgen -d -- "$cur")
    elif [[ $cur == --*=* ]]; then
        _ckpt_value "$(sed -E 's/^--//; s/=.*//' <<<"$cur")" "${cur#*=}"
    elif [[ $cur == -* ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$(sed -E 's/=.*/=/' <<<"$options")" -- "$cur")
        [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace 2>/dev/null
    elif [[ $prev == --* && -n $(sed -n "/^$prev=/p" <<<"$options") ]]; then
        _ckpt_value "${prev#--}" "$cur"
    elif [[ ${command[1]} == explain && -n $run ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$("$1" ls "$run" 2>/dev/null | awk 'NR > 1 { print $1 }')" -- "$cur")
    else
        compopt -o filenames 2>/dev/null
        mapfile -t COMPREPLY < <(compgen -f -- "$cur")
    fi
}

complete -F _ckpt_complete ckptfs ckpt
