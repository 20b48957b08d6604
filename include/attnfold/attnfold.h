/**
 * attnfold: attention for LLM serving.  One call answers one serving batch: ragged queries over a paged or ragged KV
 * cache, with a mask, on the CPU or on an NVIDIA GPU.  The bits of a request's answer depend on that request alone.
 *
 *   attnfold_plan_create   once              shapes, dtypes, mask, maxima     -> a plan; everything is validated and loaded here
 *   attnfold_plan_update   once per step     lengths and page tables          -> a schedule, reused by every layer
 *   attnfold_plan_run      once per layer    q, k, v in; o, lse out           allocates nothing
 *   attnfold_plan_destroy
 *
 *   attnfold_merge         two or more attention results over disjoint keys   -> one
 *   attnfold_convert_state an attention result in one convention of lse       -> in another
 *
 * Words.  A request is one sequence of the batch: qo_len new tokens and kv_len keys, the new tokens' own included.
 * A row is one (query token, query head) pair.  A leaf is LEAF keys of a request at absolute positions [i*LEAF, (i+1)*LEAF),
 * a super-chunk is SUPER_CHUNK leaves at absolute positions.  A cut is where the schedule divides a request's leaves between
 * workers.  Shapes are written [slowest, .., fastest].  Strides count elements, not bytes.
 *
 * Promises (docs/numerics.md has them in full, with measured errors):
 *   exact            o and lse within twice the largest error of naive float32 attention on the request, plus 2^-20 of the scale;
 *                    where a row rounds weights to 16 bits (CUDA; on CPUs names with p16, default for o in bf16 or e4m3
 *                    on AMD), o also what that may move it by
 *   same bits        a request's rows do not depend on batch mates, batch order, threads, workers, cuts, page size,
 *                    page placement, KV layout or the caller's floating-point mode; nor on whether the token came
 *                    from a decode step, a prefill, a chunked prefill or a verify step
 *   empty is a value a row that sees no key gives o = 0 and lse = -inf, always written; with a sink logit lse is the logit
 *   no leaks         what a row may not see cannot reach it, NaN and Inf included; NaN that it may see does reach it
 *   clear errors     a bad argument is named, with what was expected and what came, before anything is written
 *
 * On CUDA (attnfold_execution.backend) every array of attnfold_lengths and attnfold_tensors is device memory, and so is the
 * workspace; `stream` is a cudaStream_t, NULL being the default stream.  update and run only launch: their contents cannot be
 * checked on the host (kv_len above max_kv_len is cut to it), and a captured graph of both answers whatever lengths it finds.
 * Arrays of lengths must stay until that update has run on the device, page tables until the next one.  Strides must be
 * multiples of 8 elements, those of pages and tokens not negative.  Shared prefixes are not looked for.  Within the
 * maxima, requests without tokens may stand for those that a smaller batch lacks.
 *
 * Threads.  A plan may be run from several threads at once, each run with its own workspace and outputs, as long as no
 * thread updates or destroys it meanwhile.  Different plans are independent.  The library never prints, aborts or throws.
 * Its threads are one pool for the process, started when a call first asks for them, on CPUs that its thread may use,
 * and asleep between calls.  The calling thread works too; what others cannot take, because another call has them or the
 * system refuses to start them, it does itself.  A forked child has a pool of its own.  The library reads two environment
 * variables, once: ATTNFOLD_ISA (scalar, avx2, avx512, avx512_bf16, avx512_bf16_p16, amx_bf16, amx_bf16_p16; on AArch64
 * scalar, neon) and ATTNFOLD_NUM_THREADS.
 */
#ifndef ATTNFOLD_ATTNFOLD_H_
#define ATTNFOLD_ATTNFOLD_H_

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define ATTNFOLD_API
#else
#define ATTNFOLD_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define ATTNFOLD_VERSION_MAJOR 0
#define ATTNFOLD_VERSION_MINOR 1
#define ATTNFOLD_VERSION_PATCH 0

/** Keys per leaf, leaves per super-chunk: the bracketing of the canonical fold.  Part of the numerics, never tuned. */
#define ATTNFOLD_LEAF 128
#define ATTNFOLD_SUPER_CHUNK 16

/** Largest head dimension; every multiple of 8 up to it is served. */
#define ATTNFOLD_MAX_HEAD_DIM 576

/** What a call came to.  The comment says what the caller should do. */
typedef enum attnfold_status {
  ATTNFOLD_OK = 0,
  ATTNFOLD_INVALID_ARGUMENT = 1, /* fix the argument that attnfold_last_error() names; nothing was written */
  ATTNFOLD_UNSUPPORTED = 2,      /* a sound request that this build or machine does not serve; the text names the nearest */
  ATTNFOLD_OUT_OF_WORKSPACE = 3, /* pass at least attnfold_plan_workspace_bytes() bytes */
  ATTNFOLD_DEVICE_ERROR = 4,     /* the device or its driver failed; the text has its own words */
  ATTNFOLD_INTERNAL = 5          /* out of memory, or a fault of this library: report it with the text */
} attnfold_status;

/** Storage types.  Values are stable. */
typedef enum attnfold_dtype {
  ATTNFOLD_F32 = 0,
  ATTNFOLD_F16 = 1,  /* IEEE binary16 */
  ATTNFOLD_BF16 = 2,
  ATTNFOLD_E4M3 = 3, /* 8-bit float of OCP, 4 exponent bits: NaN is 0x7f and 0xff, no Inf, up to 448 */
  ATTNFOLD_E5M2 = 4, /* 8-bit float of OCP, 5 exponent bits: Inf is 0x7c, NaN above, up to 57344 */
  ATTNFOLD_I8 = 5    /* two's complement, -128..127 */
} attnfold_dtype;

/**
 * What a scale belongs to.  A stored k or v counts times its scale, a float32 in attnfold_tensors.  A scale may be negative
 * or 0; one that is not finite counts as NaN.  Scales of slots that no row sees are not read.
 */
typedef enum attnfold_scale_kind {
  ATTNFOLD_SCALE_NONE = 0,       /* stored values are meant as they are; not with an 8-bit type, where that is said by a 1 */
  ATTNFOLD_SCALE_PER_TENSOR = 1, /* [1] */
  ATTNFOLD_SCALE_PER_HEAD = 2,   /* [kv_heads] */
  ATTNFOLD_SCALE_PER_TOKEN = 3   /* one for each token slot and kv head: the axes of k and v without the last */
} attnfold_scale_kind;

/** Where the keys and values are. */
typedef enum attnfold_kv_storage {
  ATTNFOLD_KV_PAGED = 0, /* a pool of pages; attnfold_lengths names each request's pages */
  ATTNFOLD_KV_RAGGED = 1 /* rows of each request one after the other, at kv_indptr; also contiguous KV */
} attnfold_kv_storage;

/** Order of a page's axes, when no strides are given. */
typedef enum attnfold_kv_layout {
  ATTNFOLD_NHD = 0, /* token-major: [num_pages, page_size, kv_heads, head_dim]; ragged [kv_rows, kv_heads, head_dim] */
  ATTNFOLD_HND = 1  /* head-major:  [num_pages, kv_heads, page_size, head_dim]; ragged [kv_heads, kv_rows, head_dim] */
} attnfold_kv_layout;

typedef enum attnfold_mask_kind {
  ATTNFOLD_MASK_NONE = 0,
  ATTNFOLD_MASK_CAUSAL = 1 /* bottom-right: query i of a request sees keys j <= kv_len - qo_len + i */
} attnfold_mask_kind;

/**
 * One attention problem: everything that does not change from step to step.
 * Set it to ATTNFOLD_PROBLEM_INIT first, then fill it in.
 *
 * The window counts from the query's absolute position p = kv_len - qo_len + i, under either mask: window_left r keeps keys
 * j >= p - r, window_right r keeps keys j <= p + r.  -1 is off; 0 keeps the token's own key on that side.  Causal is
 * window_right 0, and together with a window_right the narrower holds.  Scores are soft-capped first, then get ALiBi's bias.
 *
 * The block-sparse mask is one condition more on every key, also on those of sinks, prefixes and mask bits: a query sees keys of
 * listed blocks only, block b being keys [b*B, (b+1)*B).  Leaves without such a key are neither read nor planned.  Either
 * sparse_local_blocks and sparse_vertical_stride list them: under kv head h a query at p sees block b if
 * b > max(p, 0)/B - sparse_local_blocks (not with 0 of them), or if (b + h * sparse_head_step + 1) is a multiple of sparse_vertical_stride.  Or both
 * are 0, and attnfold_lengths has a list for each request and kv head.
 */
typedef struct attnfold_problem {
  size_t struct_size;             /* sizeof(attnfold_problem), set by ATTNFOLD_PROBLEM_INIT */
  int32_t qo_heads;               /* query and output heads, >= 1, a multiple of kv_heads */
  int32_t kv_heads;               /* key and value heads, >= 1; qo_heads / kv_heads is the group size, any */
  int32_t head_dim_qk;            /* width of a q and a k row: a multiple of 8, 8..576 */
  int32_t head_dim_vo;            /* width of a v and an o row: a multiple of 8, 8..576 */
  attnfold_dtype q_dtype;         /* F32, F16 or BF16 */
  attnfold_dtype kv_dtype;        /* of k and v; any, need not be q's */
  attnfold_dtype o_dtype;         /* q's type, F32, or E4M3: rounded to nearest even, to +-448 beyond, NaN kept */
  attnfold_kv_storage kv_storage;
  attnfold_kv_layout kv_layout;
  int32_t page_size;              /* tokens per page, >= 1, any; not read when ragged */
  int64_t num_pages;              /* pages in the pool: page ids are 0..num_pages-1; not read when ragged */
  attnfold_mask_kind mask;
  int32_t window_left;            /* -1 = off */
  int32_t window_right;           /* -1 = off */
  float sm_scale;                 /* factor on q.k before softmax, >= 0 and finite; ATTNFOLD_SM_SCALE_DEFAULT = 1/sqrt(head_dim_qk) */
  int32_t max_batch;              /* maxima size buffers and nothing else: they never change a bit */
  int32_t max_qo_rows;            /* new tokens of all requests together */
  int32_t max_kv_len;             /* keys of one request */
  float logits_softcap;           /* c: scores become c * tanh(s / c), s = sm_scale * q.k; 0 = off; >= 0, and c * log2(e) and sm_scale / c are finite floats */
  int32_t attention_chunk;        /* n: a query at p, p' = max(p, 0), sees its chunk [p'/n*n, p'/n*n + n) only; 0 = off */
  int32_t sink_tokens;            /* n: keys 0..n-1 stay visible left of window_left and of the own chunk; 0 = off */
  attnfold_scale_kind k_scale_kind;
  attnfold_scale_kind v_scale_kind;
  int32_t v_in_k;                 /* 1: v is the first head_dim_vo columns of k (MLA), tensors.v stays NULL; needs
                                     head_dim_vo <= head_dim_qk.  v_scale_kind counts for v as ever.  0 = off */
  int32_t sparse_block_size;      /* B: keys in a block of the block-sparse mask, any; 0 = off */
  int32_t sparse_local_blocks;    /* n: a query sees its own block, the n - 1 before it and all after it */
  int32_t sparse_vertical_stride; /* n: every query sees each n-th block; 0 = none */
  int32_t sparse_head_step;       /* by how many blocks these move from one kv head to the next, >= 0 */
} attnfold_problem;

#define ATTNFOLD_SM_SCALE_DEFAULT (-1.0f)

#define ATTNFOLD_PROBLEM_INIT                                                                            \
  {                                                                                                      \
    sizeof(attnfold_problem), 1, 1, 128, 128, ATTNFOLD_BF16, ATTNFOLD_BF16, ATTNFOLD_BF16,               \
        ATTNFOLD_KV_PAGED, ATTNFOLD_NHD, 16, 0, ATTNFOLD_MASK_CAUSAL, -1, -1, ATTNFOLD_SM_SCALE_DEFAULT, \
        0, 0, 0, 0.0f, 0, 0, ATTNFOLD_SCALE_NONE, ATTNFOLD_SCALE_NONE, 0, 0, 0, 0, 0                     \
  }

/**
 * A host's way to run `n` bodies, i = 0..n-1, each exactly once, on any threads in any order; returns when all are done.
 * Must not throw.  A body may run on the calling thread.
 */
typedef void (*attnfold_parallel_for)(void* user, int32_t n, void (*body)(void* context, int32_t i), void* context);

/** Prefixes that several requests share (docs/shared-prefixes.md). */
typedef enum attnfold_prefix_use {
  ATTNFOLD_PREFIX_AUTO = 0,  /* read once for all of them wherever that saves bytes */
  ATTNFOLD_PREFIX_OFF = 1,   /* each request reads its own, to compare */
  ATTNFOLD_PREFIX_ALWAYS = 2 /* read once also where it does not pay, to test schedules */
} attnfold_prefix_use;

/** What runs a plan. */
typedef enum attnfold_backend {
  ATTNFOLD_CPU = 0,
  ATTNFOLD_CUDA = 1 /* an NVIDIA GPU; builds with the CUDA backend only */
} attnfold_backend;

/**
 * How to execute.  Within one numerics id, none of these can change a bit of any answer; `backend` and `isa` choose the id.
 * Set it to ATTNFOLD_EXECUTION_INIT first.
 */
typedef struct attnfold_execution {
  size_t struct_size;
  int32_t num_threads;                /* 0 = ATTNFOLD_NUM_THREADS (1..1024), else the CPUs this process may use; 1..1024 */
  int32_t num_workers;                /* shares the work is cut into; 0 = num_threads, on the library's own threads as
                                         many as suit the batch; 1..1024 */
  uint64_t cut_seed;                  /* 0 = the planner's balanced cuts; else cuts drawn from this seed, to test schedules */
  const char* isa;                    /* NULL = ATTNFOLD_ISA, else from CPUID; scalar, avx2, avx512, avx512_bf16,
                                         avx512_bf16_p16, amx_bf16, amx_bf16_p16 or neon forces the rows of that name;
                                         those with bf16 take the avx512 rows along for other types.  p16 rows round
                                         weights to bf16: unless forced they are taken only for an o in bf16 or e4m3 */
  attnfold_parallel_for parallel_for; /* NULL = the library's own threads */
  void* parallel_user;                /* handed to parallel_for */
  attnfold_prefix_use prefix_use;     /* of prefixes that several requests share */
  attnfold_backend backend;           /* where calls run; the fields above but workers and cut_seed are the CPU's alone */
  int32_t device;                     /* CUDA: the device's number; -1 = the calling thread's current device */
  void* stream;                       /* CUDA: the cudaStream_t of merges, conversions and the calls of cache.h, NULL being the
                                         default stream; not read for plans, whose calls have their own.  NULL on the CPU */
} attnfold_execution;

#define ATTNFOLD_EXECUTION_INIT \
  { sizeof(attnfold_execution), 0, 0, 0, NULL, NULL, NULL, ATTNFOLD_PREFIX_AUTO, ATTNFOLD_CPU, -1, NULL }

/**
 * The lengths of one step.  Set it to ATTNFOLD_LENGTHS_INIT first.
 *
 * Paged KV takes either `block_table` or `kv_indices` with `kv_indptr`.  Page i of a request holds its keys
 * [i*page_size, (i+1)*page_size).  Entries of pages in which no row of the request may see a key mean nothing and are never
 * read: past the last page, and before a window.
 * Ragged KV takes `kv_indptr`: request r has rows [kv_indptr[r], kv_indptr[r+1]) of k and v; `kv_len`, if given, uses only
 * the first kv_len[r] of them.  Contiguous KV of [batch, capacity] rows is ragged with kv_indptr[r] = r * capacity.
 *
 * Requests whose page tables begin with the same pages share a prefix, and its leaves are read once for all of them where
 * that saves bytes.  Nothing has to be said for that: prefixes are found, also several levels of them.  A caller who knows
 * them may name them as groups; then nothing else is searched for.  Group g says that requests
 * prefix_requests[prefix_indptr[g] .. prefix_indptr[g+1]) have the same first prefix_keys[g] keys in the same pages.  Two
 * groups are disjoint, or one holds the other and comes first, with fewer keys or as many.  Groups are checked.
 *
 * The page tables, mask_bits and lists of blocks are not copied: they must stay as they are until the next update or destroy.
 * The other arrays are copied.
 *
 * visible_prefix   Keys 0..visible_prefix[r]-1 are seen by every query of request r, also by those before them, whatever
 *                  causal, the windows and chunks say (a prefix LM; an image read in both directions).  At most kv_len[r]:
 *                  a prefill may not be cut inside the prefix, whose queries would miss the rest of it.
 * mask_width       Of the last mask_width[r] keys of request r a query sees exactly those whose bit is set, whatever causal,
 *                  windows, chunks and sink_tokens say; of the keys before them what these say.  A token tree has
 *                  mask_width = its nodes, a full custom mask mask_width = kv_len.  0 is no mask; else at least qo_len[r]
 *                  (or kv_len[r], if that is less) and at most kv_len[r], less the visible_prefix[r].
 *                  Query i's bits begin at byte mask_indptr[r] + i * ceil(mask_width[r] / 8) of mask_bits; key
 *                  kv_len[r] - mask_width[r] + b has bit b % 8, lowest first, of byte b / 8.
 *                  Positions (windows, ALiBi) stay those of the cache, not of depth in a tree.
 */
typedef struct attnfold_lengths {
  size_t struct_size;
  int32_t batch;                   /* requests, 0..max_batch; with batch 0 every pointer may be NULL */
  const int32_t* qo_indptr;        /* [batch + 1] row offsets of each request in q and o, from 0, never falling */
  const int32_t* kv_len;           /* [batch] keys of each request, 0..max_kv_len; NULL only if ragged */
  const int32_t* block_table;      /* [batch, block_table_stride] page ids, or NULL */
  int64_t block_table_stride;      /* entries from one request's pages to the next one's, >= pages of the longest request */
  const int32_t* kv_indptr;        /* [batch + 1] offsets into kv_indices, or into the rows of ragged k and v; never falling */
  const int32_t* kv_indices;       /* [kv_indptr[batch]] page ids, one request after the other */
  int64_t num_kv_rows;             /* rows that ragged k and v hold (sets head-major packed strides); 0 = kv_indptr[batch] */
  int32_t num_prefix_groups;       /* 0 = shared prefixes are found from the page tables; else paged KV only */
  const int32_t* prefix_keys;      /* [num_prefix_groups] shared keys, from key 0 on; never falling */
  const int32_t* prefix_indptr;    /* [num_prefix_groups + 1] offsets into prefix_requests, from 0, never falling */
  const int32_t* prefix_requests;  /* [prefix_indptr[num_prefix_groups]] */
  const int32_t* visible_prefix;   /* [batch] keys, or NULL */
  const int32_t* mask_width;       /* [batch] keys, or NULL; then with mask_indptr and mask_bits */
  const int64_t* mask_indptr;      /* [batch + 1] byte offsets into mask_bits, from 0 or more, never falling */
  const uint8_t* mask_bits;        /* per request [qo_len, ceil(mask_width / 8)] bytes, or NULL if they are none */
  const int32_t* block_indptr;     /* [batch * kv_heads + 1] offsets into block_indices, never falling: lists of blocks */
  const int32_t* block_indices;    /* ids of blocks that hold a key, rising in each list; NULL if there are none */
} attnfold_lengths;

#define ATTNFOLD_LENGTHS_INIT \
  { sizeof(attnfold_lengths), 0, NULL, NULL, NULL, 0, NULL, NULL, 0, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL }

/**
 * The tensors of one layer.  Set it to ATTNFOLD_TENSORS_INIT first.  A stride left at 0 means packed, in the problem's
 * layout; the head_dim axis is always contiguous.  Strides of inputs may be any, also negative.  Pointers must be aligned to
 * 16 bytes (lse and scales: 4).  An input that holds no element may be NULL.  o and lse may not overlap an input, nor each other.
 */
typedef struct attnfold_tensors {
  size_t struct_size;
  const void* q;                                           /* [qo_rows, qo_heads, head_dim_qk] */
  int64_t q_stride_row, q_stride_head;
  const void* k;                                           /* the pool, or ragged rows: see attnfold_kv_layout */
  int64_t k_stride_page, k_stride_token, k_stride_head;    /* ragged: page stride not read */
  const void* v;
  int64_t v_stride_page, v_stride_token, v_stride_head;
  void* o;                                                 /* [qo_rows, qo_heads, head_dim_vo] */
  int64_t o_stride_row, o_stride_head;
  float* lse;                                              /* [qo_rows, qo_heads] natural log, or NULL */
  int64_t lse_stride_row, lse_stride_head;
  const float* alibi_slopes;                               /* [qo_heads] slope * (j - p) is added to each score, or NULL */
  const float* sink_logits;                                /* [qo_heads] a learned term of each row's denominator, or NULL; +inf makes a row with a key NaN */
  const float* k_scale;                                    /* of the problem's k_scale_kind; per token [num_pages, page_size,
                                                              kv_heads], HND [num_pages, kv_heads, page_size]; ragged alike */
  int64_t k_scale_stride_page, k_scale_stride_token, k_scale_stride_head;   /* in floats; only of axes that the kind has */
  const float* v_scale;
  int64_t v_scale_stride_page, v_scale_stride_token, v_scale_stride_head;
  const float* o_scale;                                    /* [1] finite and > 0, with an E4M3 o: a stored o counts times it */
} attnfold_tensors;

#define ATTNFOLD_TENSORS_INIT \
  { sizeof(attnfold_tensors), NULL, 0, 0, NULL, 0, 0, 0, NULL, 0, 0, 0, NULL, 0, 0, NULL, 0, 0, NULL, NULL, \
    NULL, 0, 0, 0, NULL, 0, 0, 0, NULL }

typedef struct attnfold_plan attnfold_plan;

/**
 * Validates the problem, chooses the kernel row and reserves all memory that updates need.
 *
 * execution   NULL = all defaults
 * plan        receives the plan; not written on error
 * Errors: INVALID_ARGUMENT names the field; UNSUPPORTED if no kernel row serves the problem, or `isa` is not to be had here.
 */
ATTNFOLD_API attnfold_status attnfold_plan_create(const attnfold_problem* problem, const attnfold_execution* execution,
                                                  attnfold_plan** plan);

/**
 * Plans one step.  Checks every length, offset and page id that a run may use.
 *
 * stream   CUDA: where the planner is launched.  On the CPU it must be NULL
 * Errors: INVALID_ARGUMENT names the argument and index; the plan then keeps its last good schedule.
 */
ATTNFOLD_API attnfold_status attnfold_plan_update(attnfold_plan* plan, const attnfold_lengths* lengths, void* stream);

/**
 * Bytes of workspace that a run needs, at any lengths within the maxima.  Constant for the plan's life:
 *   64 + workers * scratch + cut_states * unit_rows * state_row + prefix_states * prefix_rows * state_row
 * state_row     (head_dim_vo rounded up to 32, + 2) floats
 * cut_states    for what cuts leave behind: 4 for each super-chunk of max_kv_len (or of the window, if smaller) and 34 for
 *               each worker; 0 with one worker.  unit_rows is the group size, at least 128
 * prefix_states for what shared prefixes leave behind: 16, or the leaves of max_kv_len if fewer.  prefix_rows is qo_heads for
 *               each of at most 256 tokens (or max_qo_rows, or 64 / group_size for each request of max_batch, if fewer); 0
 *               with ragged KV, one request or ATTNFOLD_PREFIX_OFF.  Prefixes that want more are not shared
 * On CUDA: ranges * (18 + super-chunks of max_kv_len or of the window) * kv_heads * set_rows * (head_dim_vo + 4) floats, where
 * set_rows is the group size if max_qo_rows is at most max_batch, and 16 otherwise or if the group is larger; ranges is
 * num_workers / kv_heads, by default as many as the device runs blocks at once.
 */
ATTNFOLD_API size_t attnfold_plan_workspace_bytes(const attnfold_plan* plan);

/**
 * Answers the batch: writes o, and lse unless it is NULL, for every row of every request.
 *
 * workspace         any host memory apart from the tensors, used only during the call; need not be initialised, and nothing is expected of it later
 * stream            CUDA: where the kernels are launched.  A plan that may have many rows to a request also has a stream of its
 *                   own, which begins after what is in `stream` and which `stream` waits for; captured, it is a branch of the
 *                   graph.  On the CPU it must be NULL
 * Errors: INVALID_ARGUMENT if the plan was never updated, or a tensor is missing, misaligned, overlapping or badly strided;
 *         OUT_OF_WORKSPACE.  Nothing is written then.
 */
ATTNFOLD_API attnfold_status attnfold_plan_run(const attnfold_plan* plan, const attnfold_tensors* tensors, void* workspace,
                                               size_t workspace_bytes, void* stream);

/** Frees the plan.  NULL is allowed. */
ATTNFOLD_API void attnfold_plan_destroy(attnfold_plan* plan);

/** What the current schedule will do.  Set struct_size before the call. */
typedef struct attnfold_plan_report {
  size_t struct_size;
  int32_t num_workers;
  int32_t num_requests;
  int32_t num_units;             /* (row set, kv heads, leaf range): what is cut */
  int32_t num_items;             /* workers' shares of units */
  int32_t num_cuts;              /* num_items - num_units: units that have leaves, divided between workers */
  int32_t num_cuts_inside;       /* of those, inside a super-chunk; the others lie between two */
  int32_t max_super_chunks;      /* of the request with the most visible ones */
  int64_t num_leaves;            /* leaves of all units */
  int64_t max_worker_cost;       /* largest share of work of one worker; one leaf of a unit costs at most max_leaf_cost */
  int64_t total_cost;
  int64_t max_leaf_cost;
  int64_t partial_bytes;         /* states written and read back because of cuts and shared prefixes */
  int64_t kv_bytes;              /* bytes of k, v and scales per token that the workers read, whole batch; once per kv head
                                    and row set, and once altogether where v lies in k */
  uint64_t schedule_id;          /* equal for equal schedules: hash of every unit and cut */
  int32_t num_prefix_groups;     /* sets of requests whose shared prefix is read together; a group within a group counts */
  int64_t num_shared_leaves;     /* leaves that they read together, once for each group */
  int64_t saved_kv_bytes;        /* bytes of k and v that need not be read because of them */
} attnfold_plan_report;

/** Fills the report.  On CUDA it waits for the device and reads the schedule back.
 * Errors: INVALID_ARGUMENT if the plan was never updated. */
ATTNFOLD_API attnfold_status attnfold_plan_get_report(const attnfold_plan* plan, attnfold_plan_report* report);

/**
 * One share of work: leaves [leaf_begin, leaf_end), absolute, of tokens [qo_begin, qo_begin+num_qo) of a request.  On a shared
 * prefix: of all tokens of several requests, num_qo in all; `request` is then the one whose page table is read, qo_begin 0.
 * With a block-sparse mask: num_leaves of those leaves.
 */
typedef struct attnfold_plan_item {
  size_t struct_size;
  int32_t worker, unit, request;
  int32_t qo_begin, num_qo;              /* within the request */
  int32_t kv_head_begin, num_kv_heads;
  int32_t leaf_begin, leaf_end;
  int32_t sink_leaf_begin, sink_leaf_end; /* leaves of sink_tokens or visible_prefix apart from the others, done first */
  int32_t num_requests;                  /* more than 1 on a shared prefix */
  const int32_t* requests;               /* [num_requests], valid until the next update */
  int32_t num_leaves;                    /* in all */
} attnfold_plan_item;

/** Item `index` of 0..num_items-1.  Set struct_size first.
 * Errors: INVALID_ARGUMENT; UNSUPPORTED for a plan on CUDA, which has no list of items. */
ATTNFOLD_API attnfold_status attnfold_plan_get_item(const attnfold_plan* plan, int32_t index, attnfold_plan_item* item);

/** Name of the kernel row that the plan uses, such as "cpu_avx512_bf16/bf16_bf16"; lives as long as the plan. */
ATTNFOLD_API const char* attnfold_plan_kernel(const attnfold_plan* plan);

/**
 * Numerics id of the plan's kernel row: two plans with equal ids give equal bits for equal requests, on any machine and in
 * any version that shows the same id.  Lives as long as the plan.
 */
ATTNFOLD_API const char* attnfold_plan_numerics_id(const attnfold_plan* plan);

/* ------------------------------------------------------------------------------------------------ merging of results */

typedef enum attnfold_log_base { ATTNFOLD_LOG_E = 0, ATTNFOLD_LOG_2 = 1 } attnfold_log_base;
typedef enum attnfold_lse_layout { ATTNFOLD_ROWS_HEADS = 0, ATTNFOLD_HEADS_ROWS = 1 } attnfold_lse_layout;

/** Which lse values mark a side that saw no key.  -inf and +inf always do. */
typedef enum attnfold_empty_kind {
  ATTNFOLD_EMPTY_INF = 0,   /* only those two; NaN is a result and stays NaN */
  ATTNFOLD_EMPTY_NAN = 1,   /* NaN too */
  ATTNFOLD_EMPTY_FINITE = 2 /* `empty_value` too, compared exactly; where such rows are written, it may be +inf */
} attnfold_empty_kind;

/**
 * Attention over one set of keys, of any engine, described by type.  Set it to ATTNFOLD_STATE_INIT first.
 *
 * normalised 1: o is the softmax-weighted mean of v, lse the log of the sum of exp of scaled scores (l is not read).
 * normalised 0: o is the sum of b^(s - lse) * v and l the sum of b^(s - lse), lse being the reference (usually the maximum)
 *               that both are relative to, b the log base.
 */
typedef struct attnfold_state {
  size_t struct_size;
  void* o;                                     /* [rows, heads, head_dim_vo] */
  attnfold_dtype o_dtype;
  int64_t o_stride_row, o_stride_head;         /* 0 = packed */
  float* lse;                                  /* [rows, heads] or [heads, rows] */
  attnfold_lse_layout lse_layout;
  int64_t lse_stride_row, lse_stride_head;     /* 0 = packed in lse_layout */
  attnfold_log_base log_base;
  attnfold_empty_kind empty;
  float empty_value;                           /* with ATTNFOLD_EMPTY_FINITE */
  int32_t sink_included;                       /* 1: lse and o count the learned sink; at most one side of a merge may */
  int32_t normalised;
  float* l;                                    /* strides as lse; only if not normalised */
  int64_t num_rows;                            /* -1 = all; else rows [0, num_rows) are here, and the others saw no key */
} attnfold_state;

#define ATTNFOLD_STATE_INIT \
  { sizeof(attnfold_state), NULL, ATTNFOLD_F32, 0, 0, NULL, ATTNFOLD_ROWS_HEADS, 0, 0, ATTNFOLD_LOG_E, ATTNFOLD_EMPTY_INF, 0.0f, 0, 1, NULL, -1 }

/**
 * Folds `n` attention results over disjoint key sets into one, as if computed over their union.
 *
 * states      [n], all of the struct_size of the first; n may be 0, which gives empty rows
 * out         where and in what form; out->o may be one of the states' o with the same strides and dtype, and likewise lse:
 *             the merge is then in place.  out must be normalised and have all rows; out->empty and out->sink_included are
 *             not read: an empty row is written as o = 0, lse = -inf
 * row_mask    [rows] with row_mask_stride (0 is a stride here: one value for all), or NULL.  0 leaves the row of out as it is
 *
 * An empty side leaves the other unchanged, bit for bit; what stands in its o, NaN included, is never used, and rows that a
 * state does not have are not read: with a prefix for the first num_rows rows, the others are copied from the suffix.  Two
 * sides give the same bits in either order.  Of normalised sides, o lies between the smallest and the largest that went in,
 * whatever the lse: nothing overflows.  Runs on the calling thread; up to 32 states nothing is allocated.
 * Errors: INVALID_ARGUMENT names the field; nothing is written then.
 * Source: Milakov & Gimelshein 2018 (online softmax); Dao et al. 2023 (Flash-Decoding), the merge step; Ye et al. 2025
 * (FlashInfer), section 2.2.
 */
ATTNFOLD_API attnfold_status attnfold_merge(int64_t rows, int32_t heads, int32_t head_dim_vo, const attnfold_state* states,
                                            int32_t n, const attnfold_state* out, const uint8_t* row_mask,
                                            int64_t row_mask_stride);

/**
 * attnfold_merge on `execution` (NULL = all defaults): on its threads (num_threads and parallel_for), or on the GPU if its
 * backend is ATTNFOLD_CUDA.  There all arrays are device memory, n is at most 32, and the call only launches, on
 * execution->stream; a captured graph replays it.  The same bits everywhere, but for the bits of a NaN that is not copied.
 */
ATTNFOLD_API attnfold_status attnfold_merge_parallel(int64_t rows, int32_t heads, int32_t head_dim_vo,
                                                     const attnfold_state* states, int32_t n, const attnfold_state* out,
                                                     const uint8_t* row_mask, int64_t row_mask_stride,
                                                     const attnfold_execution* execution);

/**
 * Rewrites an attention result from the convention of one engine to that of another: log base, layout, mark of empty rows,
 * type and strides of o, normalised or not.  With `to` left at ATTNFOLD_STATE_INIT but for its pointers, that is attnfold's
 * own: natural log, [rows, heads], o = 0 and lse = -inf in empty rows.
 *
 * from    num_rows may be given: the other rows are written as empty
 * to      to->empty says how an empty row is marked: -inf, NaN or empty_value; its o is 0.  Not normalised: o and lse as if
 *         it were, l = 1, or 0 in an empty row.  to->sink_included must be from's: a conversion neither adds nor takes
 *         the sink.  to->o may be from->o with the same strides and dtype, and likewise lse and l: in place
 *
 * A normalised o of the same type is copied bit for bit, so is an lse of the same base; an lse that leaves the range of a
 * float in another base becomes its largest number, never a mark.  NaN stays NaN unless from->empty says that it is a mark.
 * execution    as for attnfold_merge_parallel
 * Errors: INVALID_ARGUMENT names the field; nothing is written then.
 */
ATTNFOLD_API attnfold_status attnfold_convert_state(int64_t rows, int32_t heads, int32_t head_dim_vo,
                                                    const attnfold_state* from, const attnfold_state* to,
                                                    const attnfold_execution* execution);

/* ------------------------------------------------------------------------------------------------------- information */

/** Text of the last error of this thread, never NULL; valid until this thread's next failing call. */
ATTNFOLD_API const char* attnfold_last_error(void);

/** "OK", "INVALID_ARGUMENT", .. */
ATTNFOLD_API const char* attnfold_status_name(attnfold_status status);

/** Version as major * 10000 + minor * 100 + patch. */
ATTNFOLD_API int32_t attnfold_version(void);

/** A row of the kernel table.  Strings live as long as the process. */
typedef struct attnfold_kernel_info {
  size_t struct_size;
  const char* name;         /* "cpu_avx512/bf16" */
  const char* isa;          /* what attnfold_execution.isa takes */
  const char* q_dtypes;     /* "f32 f16 bf16" */
  const char* kv_dtype;
  const char* numerics_id;
  int32_t available;        /* 1: this machine can run it */
  const char* why_not;      /* "" if available */
} attnfold_kernel_info;

ATTNFOLD_API int32_t attnfold_num_kernels(void);

/** Row `index`, in order of preference.  Set struct_size first.  Errors: INVALID_ARGUMENT. */
ATTNFOLD_API attnfold_status attnfold_get_kernel(int32_t index, attnfold_kernel_info* info);

/**
 * Whether row `index` serves the problem.  OK if so; else UNSUPPORTED, and attnfold_last_error() says why not;
 * INVALID_ARGUMENT if the problem itself is unsound.
 */
ATTNFOLD_API attnfold_status attnfold_kernel_serves(int32_t index, const attnfold_problem* problem);

#ifdef __cplusplus
}
#endif
#endif /* ATTNFOLD_ATTNFOLD_H_ */
