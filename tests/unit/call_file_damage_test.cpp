// Call files damaged systematically: cut at every byte, bits flipped, values replaced.  Each gives a
// message or a call that can be answered.
#include <limits>

#include "unit/call_file_parts.h"

namespace attnfold::check {
namespace {

std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

TEST(CallFileDamage, NoTruncationOfARealFileGetsThrough) {
  const std::string good = read_file(real_path("decode_page1_layer05"));
  ASSERT_TRUE(reads(good));
  size_t header_end = 0;
  for (int i = 7; i >= 0; --i) header_end = header_end << 8 | static_cast<unsigned char>(good[i]);
  header_end += 8;
  for (size_t size = 0; size <= header_end; ++size) {
    EXPECT_TRUE(refused(good.substr(0, size), {})) << size << " bytes";
  }
  for (size_t size = header_end; size < good.size(); size += 20011) {
    EXPECT_TRUE(refused(good.substr(0, size), {})) << size << " bytes";
  }
  EXPECT_TRUE(refused(good.substr(0, good.size() - 1), {}));
}

TEST(CallFileDamage, EveryByteOfTheHeaderMayBeDamaged) {
  for (const Parts& parts : {paged_parts(), csr_parts(), ragged_parts()}) {
    const std::string good = parts.bytes();
    const size_t header_end = good.size() - parts.data.size();
    for (size_t at = 0; at < header_end; ++at) {
      for (int change : {0x01, 0x02, 0x08, 0x20, 0x80, 0xff}) {
        std::string bad = good;
        bad[at] = static_cast<char>(bad[at] ^ change);
        expect_survives(bad);
      }
    }
  }
}

TEST(CallFileDamage, EveryValueOfTheHeaderMayBeReplaced) {
  const json replacements[] = {nullptr,
                               true,
                               0,
                               1,
                               -1,
                               3,
                               2147483647,
                               2147483648,
                               std::numeric_limits<int64_t>::max(),
                               std::numeric_limits<uint64_t>::max(),
                               1.5,
                               1e300,
                               "",
                               "0",
                               "-1",
                               "2147483647",
                               "F32",
                               "I32",
                               std::string(100000, 'x'),
                               json::array(),
                               json::object(),
                               {0, 0},
                               {0, 192},
                               {1, 2, 3, 4}};
  for (const Parts& parts : {paged_parts(), csr_parts(), ragged_parts()}) {
    const json flat = parts.header.flatten();
    for (const auto& [pointer, value] : flat.items()) {
      for (const json& replacement : replacements) {
        if (replacement == value) continue;
        Parts bad = parts;
        bad.header[json::json_pointer(pointer)] = replacement;
        expect_survives(bad.bytes());
      }
      Parts bad = parts;  // and left out
      const json::json_pointer at(pointer);
      json& parent = bad.header[at.parent_pointer()];
      if (parent.is_object()) {
        parent.erase(at.back());
      } else {
        parent.erase(std::stoul(at.back()));
      }
      EXPECT_TRUE(refused(bad.bytes(), {})) << "without " << pointer;
    }
  }
}

TEST(CallFileDamage, EveryIntegerOfTheTablesMayBeAnything) {
  for (const Parts& parts : {paged_parts(), csr_parts(), ragged_parts()}) {
    for (const char* name : {"qo_indptr", "kv_len", "kv_indptr", "kv_indices", "block_table"}) {
      if (!parts.header.contains(name)) continue;
      const auto& offsets = parts.header[name]["data_offsets"];
      const size_t count = (offsets[1].get<size_t>() - offsets[0].get<size_t>()) / sizeof(int32_t);
      for (size_t i = 0; i < count; ++i) {
        for (int64_t value : {-2147483648ll, -1ll, 0ll, 1ll, 2ll, 4ll, 6ll, 100ll, 2147483647ll}) {
          Parts bad = parts;
          bad.overwrite<int32_t>(name, i, static_cast<int32_t>(value));
          expect_survives(bad.bytes());
        }
      }
    }
  }
}

TEST(CallFileDamage, MessagesNameTheFileAndStayShort) {
  Parts parts = paged_parts();
  parts.metadata()[std::string(50000, 'k')] = "1";
  const LoadResult result = parse_call(parts.bytes().data(), parts.bytes().size(), "some/file");
  EXPECT_EQ(result.error.rfind("some/file: ", 0), 0u);
  EXPECT_LT(result.error.size(), 400u);
}

}  // namespace
}  // namespace attnfold::check
