// A device target without a device, so that a CPU-only MindSpore compiles for a cluster.
//
// Before it writes a strategy file MindSpore's front end asks two things of the layer below: an
// initialiser for the device target, and the members of each communication group.  Both are
// answered here through its own registration hooks; MindSpore itself stays as it is.
#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "include/utils/comm_manager.h"

namespace mindspore {
class MsContext {  // the one static member that is needed; the wheel has no header for it
 public:
  static void RegisterInitFunc(const std::string &target, void (*init)(MsContext *));
};
}  // namespace mindspore

namespace {
using Ranks = std::vector<unsigned>;

unsigned world_ranks = 1;
unsigned this_rank = 0;
std::map<std::string, Ranks> groups;  // without the world itself

unsigned SizeOf(const std::string &group) {
  const auto found = groups.find(group);
  return found == groups.end() ? world_ranks : static_cast<unsigned>(found->second.size());
}

// The place of this rank in a group, or the size of the group if it is no member.
unsigned PlaceIn(const std::string &group) {
  const auto found = groups.find(group);
  if (found == groups.end()) return this_rank;
  const Ranks &ranks = found->second;
  return static_cast<unsigned>(std::find(ranks.begin(), ranks.end(), this_rank) - ranks.begin());
}

class PretendedGroups : public mindspore::CommManager {
 public:
  explicit PretendedGroups(const std::string &target) : CommManager(target) {}
  bool CreateGroupSync(const std::string &group, const Ranks &ranks) const override {
    groups[group] = ranks;
    return true;
  }
  bool DestroyGroup(const std::string &group) const override { return groups.erase(group) == 1; }
  bool GetRankID(const std::string &group, unsigned *place) const override {
    *place = PlaceIn(group);
    return *place < SizeOf(group);
  }
  bool GetRankSize(const std::string &group, unsigned *size) const override {
    *size = SizeOf(group);
    return true;
  }
  uint32_t GetRank() override { return this_rank; }
};
}  // namespace

extern "C" {
void pretend(const char *target, unsigned ranks, unsigned rank) {
  world_ranks = ranks;
  this_rank = rank;
  mindspore::MsContext::RegisterInitFunc(target, [](mindspore::MsContext *) {});
  mindspore::CommManager::Register(target, std::make_shared<PretendedGroups>(target));
}
unsigned group_size(const char *group) { return SizeOf(group); }
unsigned group_place(const char *group) { return PlaceIn(group); }
}
