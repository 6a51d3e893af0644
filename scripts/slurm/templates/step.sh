# shellcheck shell=bash
# A step that ends within one segment or is started again from its beginning.

complete() { [ "$status" = 0 ]; }
progress() { :; }

enter
segment "${python[@]}" -m "$module" "${arguments[@]}"
