#!/usr/bin/env bash
# attnfold explain: questions, answers and messages.
. "$(dirname "$0")/expect.sh" "$@"
good=$data/mixed_layer29.safetensors

expect 0 '^vLLM unified +\(1, 8, 16\) +128/128 +16 ' explain --batch 1 --context 2560
expect 0 '^FA3 +80 tiles +80/80 +10 ' explain --batch 1 --context 2560
expect 0 'one layer reads 10.5 MB of KV, 32 layers 336 MB' explain
expect 0 '2D: batch 17 > 16' explain --batch 17
expect 0 '2D: a request has 512 query tokens; batch invariance is on' explain --lengths 4096,512/2048 --batch-invariant
expect 0 'FlashInfer .* 1\.\.18 ' explain --lengths 65536,512x15
expect 0 '8/1 heads of 128' explain --model llama-3-70b --tp 8
expect 0 '16/1 heads of 576/512, latent' explain --model deepseek-v3 --tp 8
expect 0 'window 4096' explain --model mistral-7b
expect 0 'window 1024' explain --model gemma-3-27b --local
expect 0 'used: 1024 shared keys' explain --batch 64 --context 4096 --shared-prefix 1024
expect 0 '64 SMs, 1.00 TB/s, 100 TFLOP/s, ridge 100' explain --sms 64 --tb-per-s 1 --tflop-per-s 100
expect 0 '"engine": "SGLang adaptive"' explain --json
expect 0 '"ridge": 295' explain --json
expect 0 'llama-3-8b .*huggingface' explain --list
expect 0 'requests? of' explain "$good"

# What a call's KV counts: its own type, v in k once.
call=$data/verify_layer20.safetensors
kv_bytes() { "$attnfold" explain "$@" --json | sed -nE 's/^  "kv_bytes_layer": ([0-9]+).*/\1/p'; }
plain=$(kv_bytes "$call")
for type in F8_E4M3 F8_E5M2 I8; do
  with_header "$call" "$work/8bit.st" "s/\"(k|v)_cache\":\{\"dtype\":\"BF16\",\"shape\":\[56/\"\1_cache\":{\"dtype\":\"$type\",\"shape\":[112/g
    s/\"mask\"/\"k_scale\":\"1\",\"v_scale\":\"1\",\"mask\"/"
  [ "$(kv_bytes "$work/8bit.st")" = $((plain / 2)) ] || fail "explain of KV in $type: expected half of $plain bytes" "$(kv_bytes "$work/8bit.st")"
done
with_header "$call" "$work/halves.st" 's/"(k|v)_cache":\{"dtype":"BF16"/"\1_cache":{"dtype":"F16"/g; s/"(q|o)":\{"dtype":"BF16"/"\1":{"dtype":"F16"/g'
[ "$(kv_bytes "$work/halves.st")" = "$plain" ] || fail 'explain of KV in F16: expected as many bytes as in BF16'
expect 0 'runs of cpu_[a-z0-9]+/f16' explain "$work/halves.st" --measured
expect 0 'runs of cpu_[a-z0-9_]+/bf16' explain "$call" --measured
expect 0 'runs of cpu_[a-z0-9]+/f16' explain --q f16 --kv f16 --heads 4/2 --head-dim 64 --context 300 --measured

# What the model of a call has no word for.
while read -r metadata text; do
  with_header "$call" "$work/mask.st" "s/\"mask\":\"causal\"/$metadata/"
  expect 2 "mask.st: $text.*: explain knows causal rows" explain "$work/mask.st"
done <<'END'
"mask":"causal","attention_chunk":"128" attention_chunk: expected 0, got 128
"mask":"causal","sparse_block_size":"64","sparse_local_blocks":"1" sparse_block_size: expected 0, got 64
"mask":"causal","window_left":"99","sink_tokens":"4" sink_tokens: expected 0, got 4
"mask":"none" mask: expected causal with the 5 new tokens of request 0, got none
"mask":"none","window_right":"3" window_right: expected 0, got 3
END
for metadata in '"mask":"causal","sink_tokens":"4"' '"mask":"causal","window_right":"7"' '"mask":"none","window_right":"0"'; do
  with_header "$call" "$work/mask.st" "s/\"mask\":\"causal\"/$metadata/"
  [ "$(kv_bytes "$work/mask.st")" = "$plain" ] || fail "explain with $metadata: expected what causal rows see"
done

# Flags that another flag, or the file, leaves without a meaning.
for flags in '--kv fp8' '--q f16' '--batch 2' '--context 9' '--query 1' '--config c.json' '--lengths 9'; do
  # shellcheck disable=SC2086
  expect 2 "FILE: expected either a FILE or ${flags%% *}, got both" explain "$call" $flags
done
expect 2 'FILE: expected either a FILE with pages or --page-size, got both' explain "$call" --page-size 32
for flag in --batch --context --query; do
  expect 2 "--lengths: expected either it or $flag, got both" explain --lengths 512 $flag 2
done
expect 2 '--list: expected nothing else, got --json beside it' explain --list --json
expect 2 '--list: expected nothing else, got FILE beside it' explain "$call" --list
expect 2 '--book: expected --with, --json alone, got --gpu beside it' explain --gpu h100 --book kv
expect 2 'flashinfer' explain --flashinfer-no-split --flashinfer-fixed-pages 4
for value in 1e300 1e-300 0; do
  expect 2 "--tb-per-s: expected 1e-06..1e\\+06, got $value" explain --tb-per-s $value
  expect 2 "--tflop-per-s: expected 1e-06..1e\\+06, got $value" explain --tflop-per-s $value
done
printf '{"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256, "sliding_window": 2147483649}' >"$work/wide.json"
expect 2 'window: expected 0 .none., or 1..2147483647 keys, got 2147483649' explain --config "$work/wide.json" --measured

printf '{"num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 64}' >"$work/config.json"
expect 0 '6/3 heads of 64' explain --config "$work/config.json"
printf '{' >"$work/bad.json"
expect 2 'JSON object' explain --config "$work/bad.json"
expect 2 'readable' explain --config "$work/none.json"

expect 0 'measured here: .* us' explain --heads 4/2 --head-dim 64 --context 300 --measured
expect 0 '"run_us"' explain --heads 4/2 --head-dim 64 --context 300 --measured --json
expect 2 '--measured: expected keys and values apart and of one width' explain --model deepseek-v3 --measured
expect 2 '--measured: expected q, k and v of one type' explain --kv fp8 --measured
expect 0 '^ +16 .* same$' bench --quick --workers 1,2,16
expect 2 '--workers' bench --workers 0
expect 0 '1 x 4096 .* warm +2 ' bench --quick --threads 1,2 --shapes 1x4096
expect 2 '--shapes: expected some of 16x8192, .*got 7x7' bench --threads 1,2 --shapes 7x7
expect 0 '1x300:9/3:d64:f16:page1:hnd +9/3 +f16 +cold' bench --quick --shapes 1x300:9/3:d64:f16:page1:hnd
expect 0 '64on100 +32/8 +bf16' bench --quick --threads 2 --shapes 64on100,3x40
expect 2 'head_dim_qk: expected .*got 7' bench --quick --shapes 1x128:d7

expect 2 '--model: expected one of llama-2-7b, .*got gpt-9' explain --model gpt-9
expect 2 '--gpu: expected here or one of a100, .*got tpu' explain --gpu tpu
expect 2 '--window requires --heads' explain --window 100
expect 2 '--model: expected a value' explain --model ''
expect 2 '--tp: expected a divisor of the 32 query heads, got 3' explain --tp 3
expect 2 'local: llama-3-8b has no windowed layers' explain --local
expect 2 '--lengths: .*got 12y' explain --lengths 12y
expect 2 '--lengths: .*got $' explain --lengths ''
expect 2 '--lengths' explain --lengths 99999999999999999999
expect 2 'query tokens: expected 1..100, .*got 200' explain --lengths 200/100
expect 2 '--context: expected 1..16777216, got 0' explain --context 0
expect 2 'shared prefix: expected 0..100, got 101' explain --context 100 --shared-prefix 101
expect 2 '--kv: expected f32, f16, bf16 or fp8, got int4' explain --kv int4
expect 2 'kv_heads: expected a divisor of qo_heads \(9\), got 2' explain --heads 9/2
expect 2 'expected one of them' explain --heads 8 --model llama-3-8b
expect 2 'got both' explain "$good" --model llama-3-8b
expect 2 'missing' explain "$work/missing"

expect 0 'one layer reads' explain --html "$work/page.html"
grep -q '<svg' "$work/page.html" || fail "--html wrote no pictures"
expect 2 '--html: .*cannot be written' explain --html "$work/no/such/folder/page.html"

expect 0 'partial_bytes_per_row +8320 B +agrees' explain --book
expect 0 'overflow_margin_sigma +7.40.*errs +printed as nine' explain --book
expect 0 'traffic_materialised_gib +16.15625 GiB +rounds +printed as 16.156' explain --book traffic_materialised_gib
expect 0 'kv_bytes_layer_s2560 +20971520 B' explain --book kv_bytes_layer_s2560 --with h_kv=16
expect 2 "no number has 'wisdom'" explain --book wisdom
expect 2 '--with: expected NAME=NUMBER, got h' explain --book --with h
expect 2 'expected h_kv to divide h' explain --book group_size --with h=9
expect 2 'whole number >= 1, got 0' explain --book group_size --with h_kv=0
expect 2 '60 bits' explain --book s_bytes --with T=1e12
expect 2 '--book' explain --with h=9
finish
