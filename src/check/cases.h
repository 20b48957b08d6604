// Named cases: reported faults of attention kernels, each as a claim that the engine can be held to
// by name and seed.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "check/call.h"

namespace attnfold::check {

struct NamedCase {
  const char* name;
  const char* claim;  // what must hold
  const char* ref;    // where the fault was reported
  // Runs every variant; isa NULL = ATTNFOLD_ISA, else from CPUID.  "" = the claim holds, else what
  // is wrong.
  std::string (*run)(uint64_t seed, const char* isa);
};

/** A case that cannot run yet, and the one feature that it waits for. */
struct WaitingCase {
  const char* name;
  const char* feature;
};

std::span<const NamedCase> named_cases();
const NamedCase* find_case(std::string_view name);  // NULL if there is none
std::span<const WaitingCase> waiting_cases();

/**
 * A whole call under a name, for the command line: `long_decode_20000` (one decode of 20,000 keys
 * beside two short ones) and `random` (random_case of the seed).  Nothing if the name is unknown.
 */
std::optional<Call> case_call(std::string_view name, uint64_t seed);

}  // namespace attnfold::check
