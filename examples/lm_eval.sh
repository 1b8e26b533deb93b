#!/bin/sh
# The tasks of examples/lm_eval by EleutherAI's harness, through `foretell serve`.
#
#     pip install 'lm-eval[api]' transformers
#     foretell serve --model smollm2          # in another terminal
#     sh examples/lm_eval.sh "$(foretell fetch smollm2)"
#
# The folder is that of the model's tokenizer: to score choices the harness counts tokens itself. A
# second argument is the name that the server has the model by.
#
# OPENAI_BASE_URL and OPENAI_API_KEY say where the server is and who asks.
set -eu
if [ $# -lt 1 ]; then
    echo "usage: sh examples/lm_eval.sh FOLDER [MODEL]" >&2
    exit 2
fi
URL=${OPENAI_BASE_URL:-http://127.0.0.1:8000/v1}
# A folder by its whole name, since the tasks are read from their own folder.
FOLDER=$(cd "$1" 2>/dev/null && pwd || echo "$1")
MODEL=${2:-smollm2}
cd "$(dirname "$0")/lm_eval"
${LM_EVAL:-lm_eval} --model local-completions \
    --model_args "model=$MODEL,base_url=$URL/completions,tokenizer=$FOLDER,num_concurrent=4" \
    --include_path . --tasks capitals_choice,capitals_text
