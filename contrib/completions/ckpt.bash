# SPDX-License-Identifier: Apache-2.0
# bash completion for ckptfs and ckpt.

_ckptfs_words='base= dtype= view= max_shard_size= recipe= rope= allow_partial follow_symlinks'
_ckptfs_mount_words='wait io= readahead= threads= allow_other uid= gid= umask= auto_unmount noexec noatime'

# Complete the last word of a comma-separated -o list.
_ckptfs_option() {
    local cur=$1 words=$2 done last word
    last=${cur##*,}
    done=${cur%"$last"}
    case $last in
    dtype=*) words='auto stored bfloat16 float16 float32' ;;
    view=*) words='hf raw' ;;
    io=*) words='buffered direct' ;;
    base=* | recipe=*)
        compopt -o nospace -o filenames
        mapfile -t COMPREPLY < <(compgen -f -- "${last#*=}")
        return
        ;;
    esac
    case $last in
    *=*) # readline splits words at '=': only the value is completed
        mapfile -t COMPREPLY < <(compgen -W "$words" -- "${last#*=}")
        return
        ;;
    esac
    COMPREPLY=()
    for word in $words; do
        [[ $word == "$last"* ]] && COMPREPLY+=("$done$word")
    done
    compopt -o nospace
}

_ckptfs() {
    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]}
    [[ $cur == = ]] && cur=
    if [[ $prev == -o ]]; then
        _ckptfs_option "$cur" "$_ckptfs_words $_ckptfs_mount_words"
    elif [[ $cur == -* ]]; then
        mapfile -t COMPREPLY < <(compgen -W '-f -d -o -h -V --help --version' -- "$cur")
    else
        compopt -o filenames
        mapfile -t COMPREPLY < <(compgen -d -- "$cur")
    fi
}

_ckpt() {
    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]} i command= run=
    for ((i = 1; i < COMP_CWORD; i++)); do
        case ${COMP_WORDS[i]} in
        -o | --step | --jobs) ((i++)) ;;
        -*) ;;
        *)
            if [[ -z $command ]]; then
                command=${COMP_WORDS[i]}
            elif [[ -z $run ]]; then
                run=${COMP_WORDS[i]}
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
    if [[ $cur == -* ]]; then
        mapfile -t COMPREPLY < <(compgen -W '--step --json --jobs --files --tensors -q -o -h -V' -- "$cur")
    elif [[ -z $command ]]; then
        mapfile -t COMPREPLY < <(compgen -W 'info ls explain export verify digest load plan' -- "$cur")
    elif [[ $command == explain && -n $run ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$(ckpt ls "$run" 2>/dev/null | awk 'NR > 1 { print $1 }')" -- "$cur")
    else
        compopt -o filenames
        mapfile -t COMPREPLY < <(compgen -f -- "$cur")
    fi
}

complete -F _ckptfs ckptfs
complete -F _ckpt ckpt
