// What `attnfold explain` prints: a table, JSON, the book.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "explain/engines.h"

namespace attnfold::tools {

std::string explain_text(const explain::Question& question,
                         const std::vector<explain::Line>& lines);
nlohmann::ordered_json explain_json(const explain::Question& question,
                                    const std::vector<explain::Line>& lines);

/** Model and batch; machine. */
std::string call_text(const explain::Question& question);
std::string machine_text(const explain::Machine& machine);
std::string splits_text(const std::vector<int32_t>& splits);

/** Models and machines that are known by name. */
std::string known_text();

/** Rows whose names hold `part`, with `changes` ("h=64,h_kv=4") to their inputs; throws BadInput.
 */
std::string book_text(const std::string& part, const std::string& changes);
nlohmann::ordered_json book_json(const std::string& part, const std::string& changes);

}  // namespace attnfold::tools
