# SPDX-License-Identifier: Apache-2.0
# fish completion for ckpt: of what its --help lists; ckptfs.fish is its twin.

# The words that can follow: "--word" and "--word=VALUE", with each value that --help lists.
function __ckpt_options
    set -l words (commandline -opc)
    set -l command $words[1]
    test (path basename $command) = ckpt; and set command $command (string match -v -- '-*' $words[2..])[1]
    for option in ($command --help 2>/dev/null | string match -rg '^  (?:-.,|   ) (--[a-z][a-z_-]*(?:=[^ ]*)?)')
        set -l parts (string split -m 1 = -- $option)
        if string match -qr '[a-z]\|' -- $parts[2]
            printf '%s\n' $parts[1]=(string split '|' -- $parts[2])
        else if set -q parts[2]
            echo $parts[1]=
        else
            echo $option
        end
    end
end

function __ckpt_no_command
    test -z (string match -v -- '-*' (commandline -opc)[2..])[1]
end

complete -c ckpt -n __ckpt_no_command -f -a '(ckpt --help | string match -rg "^  ckpt ([a-z]+) ")'
complete -c ckpt -n 'not __ckpt_no_command; and string match -q -- "-*" (commandline -ct)' -f -a '(__ckpt_options)'
