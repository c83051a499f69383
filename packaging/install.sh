#!/bin/sh
# Installs halo below a prefix (~/.local, or the first argument) from the archive that this script is in. With an archive's address as
# the second argument, or beside the script, it is fetched and compared with SHA256SUMS first:
#
#     ./install.sh                                   from an unpacked archive
#     install.sh PREFIX ADDRESS/halo-VERSION-linux-x86_64.tar.gz
set -eu

fail() {
    echo "install.sh: $*" >&2
    exit 1
}

case ${1:-} in
-*)
    sed -n '2,/^set /{ /^#/s/^# \{0,1\}//p; }' "$0"
    exit 2
    ;;
esac
prefix=${1:-$HOME/.local}
from=${2:-}
here=$(cd "$(dirname "$0")" && pwd)

[ "$(uname -s)" = Linux ] || fail "this archive is for Linux, not for $(uname -s)"

if [ -n "$from" ]; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    archive=$(basename "$from")
    for file in "$from" "$(dirname "$from")/SHA256SUMS"; do
        case $file in
        https://*) curl --proto =https --fail --silent --show-error --location --output "$work/$(basename "$file")" "$file" ;;
        http://* | ftp://*) fail "$file is not fetched: use https" ;;
        *) cp "$file" "$work/" ;;
        esac || fail "$file cannot be fetched"
    done
    expected=$(grep "  $archive\$" "$work/SHA256SUMS") || fail "SHA256SUMS has no line for $archive"
    (cd "$work" && echo "$expected" | sha256sum --check --quiet) || fail "$archive is damaged: its checksum differs"
    tar -xzf "$work/$archive" -C "$work"
    here=$work/${archive%.tar.gz}
fi

[ -x "$here/bin/halo" ] || fail "there is no bin/halo in $here"
machine=$(uname -m)
[ "$(cat "$here/share/halo/machine")" = "$machine" ] || fail "this archive is for $(cat "$here/share/halo/machine"), and this is $machine"

mkdir -p "$prefix/bin" "$prefix/lib" "$prefix/share"
rm -rf "$prefix/lib/halo.new"
cp -R "$here/lib/halo" "$prefix/lib/halo.new"
# The program and its libraries are of one version: a program that runs keeps the files it has opened.
rm -rf "$prefix/lib/halo"
mv "$prefix/lib/halo.new" "$prefix/lib/halo"
cp "$here/bin/halo" "$prefix/bin/halo.new"
mv "$prefix/bin/halo.new" "$prefix/bin/halo"
cp -R "$here/share/." "$prefix/share/"
"$prefix/bin/halo" --version
case ":$PATH:" in
*":$prefix/bin:"*) ;;
*) echo "add it to the PATH: export PATH=\"$prefix/bin:\$PATH\"" ;;
esac
echo "start it with 'halo chat' or 'halo serve'; 'halo self-check' says what is missing"
