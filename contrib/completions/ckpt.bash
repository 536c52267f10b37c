# SPDX-License-Identifier: Apache-2.0
# bash completion for ckptfs and ckpt.

_ckptfs_words='base= dtype= view= tp= pp= vpp= ep= etp= ranks= names= max_shard_size= recipe= rope= model_type= dequantize lora=adapter lora=merge lora=base allow_partial allow_mixed allow_leftover follow_symlinks'
_ckptfs_mount_words='wait io= readahead= threads= allow_other sandbox=no uid= gid= umask= auto_unmount noexec noatime'

_ckpt_load_options='--layout --readers --share --verify --check --transport --host-bytes --device-bytes --window-bytes --threads --direct --read-timeout --exchange-timeout --rates --ranks --ranks-per-node --step --json -o -h -V'

# The token being typed and the one before it. Not COMP_WORDS: readline splits that at '='.
_ckptfs_tokens() {
    local line=${COMP_LINE:0:COMP_POINT}
    cur=${line##*[[:space:]]}
    line=${line%"$cur"}
    line=${line%"${line##*[![:space:]]}"}
    prev=${line##*[[:space:]]}
}

# Complete the last word of a comma-separated -o list. Replies replace what follows the last '=', as readline sees words.
_ckptfs_option() {
    local cur=$1 words=$2 last=${1##*,} begun word
    begun=${cur##*=}
    COMPREPLY=()
    case $last in
    dtype=*) words='auto stored bfloat16 float16 float32' ;;
    view=*) words='hf raw memory dcp dcp_hf torchtitan nanotron megatron megatron_legacy' ;;
    names=*) words='hub memory' ;;
    io=*) words='buffered direct' ;;
    base=* | recipe=*)
        compopt -o nospace -o filenames 2>/dev/null
        mapfile -t COMPREPLY < <(compgen -f -- "${last#*=}")
        return
        ;;
    *=*) return ;;
    *)
        compopt -o nospace 2>/dev/null
        for word in $words; do
            [[ $word == "$last"* ]] && COMPREPLY+=("${begun%"$last"}$word")
        done
        return
        ;;
    esac
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "${last#*=}")
}

_ckptfs() {
    local cur prev
    _ckptfs_tokens
    if [[ $prev == -o ]]; then
        _ckptfs_option "$cur" "$_ckptfs_words $_ckptfs_mount_words"
    elif [[ $cur == -* ]]; then
        mapfile -t COMPREPLY < <(compgen -W '-f -d -o -h -V --help --version' -- "$cur")
    else
        compopt -o filenames 2>/dev/null
        mapfile -t COMPREPLY < <(compgen -d -- "$cur")
    fi
}

_ckpt() {
    local cur prev i command= run= words
    _ckptfs_tokens
    read -ra words <<<"${COMP_LINE:0:COMP_POINT - ${#cur}}"
    for ((i = 1; i < ${#words[@]}; i++)); do
        case ${words[i]} in
        -o | --step | --jobs) ((i++)) ;;
        -*) ;;
        *)
            if [[ -z $command ]]; then
                command=${words[i]}
            elif [[ -z $run ]]; then
                run=${words[i]}
            fi
            ;;
        esac
    done
    case $prev in
    -o)
        _ckptfs_option "$cur" "$_ckptfs_words"
        return
        ;;
    --jobs) return ;;
    --step)
        [[ -d $run ]] && mapfile -t COMPREPLY < <(cd -- "$run" && compgen -d -- "$cur")
        return
        ;;
    esac
    if [[ $cur == -* && ($command == load || $command == plan) ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$_ckpt_load_options" -- "$cur")
    elif [[ $cur == -* ]]; then
        mapfile -t COMPREPLY < <(compgen -W '--step --json --jobs --files --tensors --weights-only --no-weights -q -v -o -h -V' -- "$cur")
    elif [[ -z $command ]]; then
        mapfile -t COMPREPLY < <(compgen -W 'info ls explain export verify digest load plan' -- "$cur")
    elif [[ $command == explain && -n $run ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$(ckpt ls "$run" 2>/dev/null | awk 'NR > 1 { print $1 }')" -- "$cur")
    else
        compopt -o filenames 2>/dev/null
        mapfile -t COMPREPLY < <(compgen -f -- "$cur")
    fi
}

complete -F _ckptfs ckptfs
complete -F _ckpt ckpt
