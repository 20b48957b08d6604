// Slots, kernel pages and copies of pages, against what they are defined to be.
#include <gtest/gtest.h>

#include <string>

#include "property/cache_pool.h"

namespace attnfold::property {
namespace {

/** A random step: tables with wild ids wherever no new token lies. */
struct Step {
  int32_t page_size, num_pages;
  std::vector<int32_t> qo_indptr{0}, kv_len, table, indptr{0}, indices;
  int64_t table_stride = 0;
  std::vector<int64_t> positions;

  int32_t batch() const { return static_cast<int32_t>(kv_len.size()); }
  int32_t tokens() const { return qo_indptr.back(); }
  attnfold_lengths lengths(bool by_table) const {
    attnfold_lengths l = ATTNFOLD_LENGTHS_INIT;
    l.batch = batch();
    l.qo_indptr = qo_indptr.data();
    l.kv_len = kv_len.data();
    if (by_table) {
      l.block_table = table.data();
      l.block_table_stride = table_stride;
    } else {
      l.kv_indptr = indptr.data();
      l.kv_indices = indices.data();
    }
    return l;
  }
};

Step any_step() {
  Step s;
  s.page_size = *rc::gen::element(1, 2, 7, 16);
  s.num_pages = *rc::gen::inRange(1, 50);
  const int32_t batch = *rc::gen::inRange(1, 6);
  for (int32_t r = 0; r < batch; ++r) {
    const bool is_padding = *rc::gen::inRange(0, 4) == 0;
    const int32_t kv_len = is_padding ? 0 : *rc::gen::inRange(1, 90);
    const int32_t qo_len =
        is_padding ? *rc::gen::inRange(0, 3) : *rc::gen::inRange(0, std::min(kv_len, 9) + 1);
    s.qo_indptr.push_back(s.qo_indptr.back() + qo_len);
    s.kv_len.push_back(kv_len);
    s.table_stride = std::max<int64_t>(s.table_stride, (kv_len + s.page_size - 1) / s.page_size);
  }
  s.table_stride += *rc::gen::inRange(0, 3);
  s.table.assign(static_cast<size_t>(batch * s.table_stride), 0x7ffffff0);
  for (int32_t r = 0; r < batch; ++r) {
    const int32_t qo_len = s.qo_indptr[r + 1] - s.qo_indptr[r];
    for (int32_t i = 0; i < qo_len; ++i) {
      if (s.kv_len[r] == 0) {
        s.positions.push_back(-1);
        continue;
      }
      const int32_t position = s.kv_len[r] - qo_len + i;
      int32_t& id = s.table[r * s.table_stride + position / s.page_size];
      if (id >= s.num_pages) id = *rc::gen::inRange(0, s.num_pages);
      s.positions.push_back(position);
    }
    s.indices.insert(s.indices.end(), s.table.begin() + r * s.table_stride,
                     s.table.begin() + (r + 1) * s.table_stride);
    s.indptr.push_back(static_cast<int32_t>(s.indices.size()));
  }
  return s;
}

TEST(SlotMappingProperty, EverySlotIsItsPositionsPlace) {
  EXPECT_TRUE(rc::check("slot / page_size is the page of the position, the rest its offset", [] {
    const Step s = any_step();
    const int64_t n = s.tokens() + *rc::gen::inRange(0, 5);
    for (const bool by_table : {true, false}) {
      for (const int64_t* positions : {static_cast<const int64_t*>(nullptr), s.positions.data()}) {
        std::vector<int64_t> slots(static_cast<size_t>(n) + 2, 12345);
        attnfold_lengths l = s.lengths(by_table);
        if (positions && *rc::gen::arbitrary<bool>()) l.kv_len = nullptr;
        if (attnfold_slot_mapping(&l, s.page_size, s.num_pages, positions, n, slots.data() + 1) !=
            ATTNFOLD_OK)
          RC_FAIL(attnfold_last_error());
        RC_ASSERT(slots.front() == 12345 && slots.back() == 12345);
        for (int32_t r = 0; r < s.batch(); ++r) {
          for (int32_t row = s.qo_indptr[r]; row < s.qo_indptr[r + 1]; ++row) {
            const int64_t slot = slots[static_cast<size_t>(row) + 1], position = s.positions[row];
            if (position < 0) {
              RC_ASSERT(slot == -1);
              continue;
            }
            RC_ASSERT(slot / s.page_size == s.table[r * s.table_stride + position / s.page_size]);
            RC_ASSERT(slot % s.page_size == position % s.page_size);
          }
        }
        for (int64_t i = s.tokens(); i < n; ++i) RC_ASSERT(slots[static_cast<size_t>(i) + 1] == -1);
      }
    }
  }));
}

TEST(KernelPagesProperty, ATokenKeepsItsSlot) {
  EXPECT_TRUE(rc::check("position p has the same slot by blocks and by kernel pages", [] {
    const int32_t page_size = *rc::gen::element(1, 2, 3, 16), n = *rc::gen::inRange(1, 9);
    const int32_t block_size = page_size * n, num_blocks = *rc::gen::inRange(1, 40);
    const int32_t batch = *rc::gen::inRange(0, 5), width = *rc::gen::inRange(0, 6);
    const int64_t stride = width + *rc::gen::inRange(0, 3),
                  page_stride = int64_t{width} * n + *rc::gen::inRange(0, 3);
    std::vector<int32_t> blocks(static_cast<size_t>(batch * stride)), used;
    for (int32_t& b : blocks) b = *rc::gen::inRange(-1, num_blocks);
    const bool with_used = *rc::gen::arbitrary<bool>();
    for (int32_t r = 0; r < batch; ++r) {
      used.push_back(with_used ? *rc::gen::inRange(0, width + 1) : width);
      for (int64_t i = used[r]; i < stride; ++i) blocks[r * stride + i] = -777;  // never read
    }
    std::vector<int32_t> pages(static_cast<size_t>(batch * page_stride) + 1, 4242);
    if (attnfold_map_to_kernel_pages(batch, width, block_size, page_size, num_blocks, blocks.data(),
                                     stride, with_used ? used.data() : nullptr, pages.data(),
                                     page_stride) != ATTNFOLD_OK)
      RC_FAIL(attnfold_last_error());
    for (int32_t r = 0; r < batch; ++r) {
      for (int64_t p = 0; p < page_stride * page_size; ++p) {
        const int32_t page = pages[r * page_stride + p / page_size];
        const int64_t i = p / block_size;
        if (i >= width) {
          RC_ASSERT(page == 4242);
        } else if (i >= used[r] || blocks[r * stride + i] == -1) {
          RC_ASSERT(page == -1);
        } else {
          RC_ASSERT(int64_t{page} * page_size + p % page_size ==
                    int64_t{blocks[r * stride + i]} * block_size + p % block_size);
        }
      }
    }
    RC_ASSERT(pages.back() == 4242);
  }));
}

void copy_naively(TestPool* from, TestPool* to, const std::vector<int32_t>& pairs) {
  for (size_t i = 0; i < pairs.size(); i += 2) {
    for (int32_t t = 0; t < from->page_size; ++t) {
      for (int32_t h = 0; h < from->kv_heads; ++h) {
        for (int32_t e = 0; e < from->width_k; ++e)
          std::memmove(to->element(to->k, pairs[i + 1], t, h, e),
                       from->element(from->k, pairs[i], t, h, e),
                       static_cast<size_t>(from->bytes()));
        for (int32_t e = 0; from->has_v && e < from->width_v; ++e)
          std::memmove(to->element(to->v, pairs[i + 1], t, h, e),
                       from->element(from->v, pairs[i], t, h, e),
                       static_cast<size_t>(from->bytes()));
      }
    }
  }
}

std::vector<int32_t> any_pairs(const TestPool& from, const TestPool& to, int max) {
  std::vector<int32_t> pairs;
  const int n = *rc::gen::inRange(0, max);
  for (int i = 0; i < n; ++i) {
    pairs.push_back(static_cast<int32_t>(*rc::gen::inRange<int64_t>(0, from.num_pages)));
    pairs.push_back(static_cast<int32_t>(*rc::gen::inRange<int64_t>(0, to.num_pages)));
  }
  return pairs;
}

TEST(CopyPagesProperty, WithinAPoolPairsTakeEffectInOrder) {
  EXPECT_TRUE(rc::check("chains, cycles and repeats give what one pair after the other gives", [] {
    TestPool pool = any_pool();
    const bool is_large = *rc::gen::inRange(0, 4) == 0;  // several shares
    if (is_large) {
      pool.page_size = 64;
      pool.width_k = 128;
      lay_out(&pool);
    }
    TestPool want = pool;
    const std::vector<int32_t> pairs = any_pairs(pool, pool, is_large ? 40 : 20);
    copy_naively(&want, &want, pairs);
    const attnfold_kv_pool view = pool.view();
    const attnfold_execution e = any_execution();
    if (attnfold_copy_pages(&view, &view, pairs.data(), static_cast<int64_t>(pairs.size() / 2),
                            &e) != ATTNFOLD_OK)
      RC_FAIL(attnfold_last_error());
    RC_ASSERT(pool.memory == want.memory);
  }));
}

TEST(CopyPagesProperty, BetweenPoolsOfAnyLayouts) {
  EXPECT_TRUE(rc::check("pages arrive bit for bit in another layout; the source stays", [] {
    TestPool from = any_pool(), to = from;
    to.num_pages = *rc::gen::inRange(1, 12);
    lay_out(&to);
    TestPool want = to;
    const std::vector<char> before = from.memory;
    const std::vector<int32_t> pairs = any_pairs(from, to, 20);
    copy_naively(&from, &want, pairs);
    const attnfold_kv_pool source = from.view(), target = to.view();
    const attnfold_execution e = any_execution();
    if (attnfold_copy_pages(&source, &target, pairs.data(), static_cast<int64_t>(pairs.size() / 2),
                            &e) != ATTNFOLD_OK)
      RC_FAIL(attnfold_last_error());
    RC_ASSERT(to.memory == want.memory);
    RC_ASSERT(from.memory == before);
  }));
}

}  // namespace
}  // namespace attnfold::property
