#!/bin/sh
# The tests of the C code on a build with bounds checks and AddressSanitizer, made in a
# throw-away copy of the package; and those of the threads without the GIL, which serve live
# clients and write large operations, with ThreadSanitizer. PYTHON names the interpreter of an
# environment with the development tools in it; arguments go to pytest.
set -eu

here=$(cd "$(dirname "$0")/.." && pwd)
PYTHON=${PYTHON:-$here/.venv/bin/python}
CC=${CC:-gcc}

# What has to be loaded before Python, which is not built with the sanitizer itself.
library_of() {
    case $($CC -print-file-name="$1") in
    /*) $CC -print-file-name="$1" ;;
    *)
        echo "sanitize: $CC has no $1; install it (gcc) or name another compiler in CC" >&2
        exit 1
        ;;
    esac
}
library=$(library_of libasan.so)
thread_library=$(library_of libtsan.so)

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT TERM

mkdir "$scratch/main"
(cd "$here" && find setup.py pyproject.toml datastreamer tests bench docs examples -type f \
    ! -name '*.c' ! -name '*.so' ! -name '*.pyc' | tar -cf - -T -) | tar -xf - -C "$scratch/main"
# The tests look for the stream of a production node beside the checkout.
[ ! -d "$here/../shared" ] || ln -s "$(cd "$here/../shared" && pwd)" "$scratch/shared"

cd "$scratch/main"
echo "sanitize: building with bounds checks and AddressSanitizer"
touch README.md LICENSE
DATASTREAMER_CHECKED=1 CC=$CC CFLAGS="-fsanitize=address -fno-omit-frame-pointer -U_FORTIFY_SOURCE" \
    LDFLAGS="-fsanitize=address" "$PYTHON" -W ignore setup.py --quiet build_ext --inplace

# PYTHONMALLOC=malloc: every object has its own red zones. Python never frees all.
run() {
    LD_PRELOAD=$library PYTHONMALLOC=malloc PYTHONPATH=$scratch/main \
        ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:abort_on_error=0 "$@"
}

# A sanitizer that is not at work would find nothing either: let it see one bad read.
if run "$PYTHON" -c '
import ctypes, datastreamer._codec as codec
assert codec.__file__.startswith("'"$scratch"'"), codec.__file__
assert b"__asan_report_load" in open(codec.__file__, "rb").read()
block = bytes(100)
ctypes.memmove(ctypes.create_string_buffer(4096), id(block) + 64, 4000)
' >"$scratch/proof" 2>&1 || ! grep -q heap-buffer-overflow "$scratch/proof"; then
    cat "$scratch/proof" >&2
    echo "sanitize: AddressSanitizer does not detect a read past the end of a buffer; no test ran" >&2
    exit 1
fi

run "$PYTHON" -m pytest -p no:cacheprovider tests/codec tests/zkevm/test_decoding.py \
    tests/reassembly tests/arrow/test_record_batches.py tests/storage/write/test_lane.py \
    tests/storage/write/test_append.py tests/storage/bookmarks/test_keeper.py \
    tests/storage/bookmarks/test_blocks.py tests/storage/read/test_at_hand.py \
    tests/storage/disk/test_file_ops.py tests/storage/disk/test_placement.py \
    tests/protocol/test_server.py tests/server/test_bookmark_queries.py \
    tests/server/streaming/test_live_thread.py tests/server/streaming/test_early_waking.py "$@"

# ThreadSanitizer knows the locks of Python, and sees the accesses of these two modules.
echo "sanitize: the threads without the GIL, with ThreadSanitizer"
mkdir "$scratch/threads"
(cd "$here" && find pyproject.toml datastreamer tests -type f ! -name '*.c' ! -name '*.pyc' \
    | tar -cf - -T -) | tar -xf - -C "$scratch/threads"
ask() { "$PYTHON" -c "import sysconfig; print(sysconfig.$1)"; }
compile() { $CC -shared -fPIC -O1 -g -fsanitize=thread -I"$(ask 'get_path("include")')" "$@"; }
for module in datastreamer/server/streaming/_live_thread datastreamer/storage/disk/_placement; do
    compile "$scratch/main/$module.c" \
        -o "$scratch/threads/$module$(ask 'get_config_var("EXT_SUFFIX")')"
done
cat >"$scratch/race.c" <<'END'
#include <pthread.h>
int count;
static void *add(void *ignored) { for (int i = 0; i < 1000; i++) count++; return ignored; }
void race(void) { pthread_t it; pthread_create(&it, 0, add, 0); add(0); pthread_join(it, 0); }
END
compile "$scratch/race.c" -o "$scratch/race.so"

cd "$scratch/threads"
run_threads() {
    LD_PRELOAD=$thread_library PYTHONPATH=$scratch/threads TSAN_OPTIONS=exitcode=66 "$@"
}
if run_threads "$PYTHON" -c "import ctypes; ctypes.CDLL('$scratch/race.so').race()" \
    >"$scratch/proof" 2>&1 || ! grep -q "data race" "$scratch/proof"; then
    cat "$scratch/proof" >&2
    echo "sanitize: ThreadSanitizer does not detect a data race; no test ran" >&2
    exit 1
fi
# It supports no new thread after a fork.
run_threads "$PYTHON" -m pytest -p no:cacheprovider tests/server/streaming/test_live_thread.py \
    tests/server/streaming/test_early_waking.py \
    tests/storage/disk/test_placement.py -k "not child_of_a_fork"
