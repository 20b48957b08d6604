// The shapes of attnfold bench --backend cuda.  Part of every build, so that a name is checked
// where there is no CUDA too.
#pragma once

#include <string>
#include <vector>

namespace attnfold::tools {

struct CudaDecode {
  const char* name;
  int qo_heads, kv_heads, head_dim, page_size;
  std::vector<int> kv_len;
  bool head_major = false;
};

struct CudaRequest {
  int qo_len, kv_len;
};

struct CudaPrefill {  // of 32 and 8 heads, causal
  const char* name;
  std::vector<CudaRequest> requests;
  int head_dim = 128, page_size = 16;
  float softcap = 0.0f;
};

struct CudaMerge {
  std::string name;
  int tokens;
};

std::vector<CudaDecode> cuda_decodes();
std::vector<CudaMerge> cuda_merges();
std::vector<CudaPrefill> cuda_prefills();

/** Those of all three, in the order of the tables. */
std::vector<std::string> cuda_shape_names();

}  // namespace attnfold::tools
