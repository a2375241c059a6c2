#include "emulator/machine/async.h"

#include <algorithm>

namespace flash_attention::emulator {

void AsyncEngine::reset() {
  due_.clear();
  signalling_.clear();
  now_ = 0;
}

AsyncEngine::Moment AsyncEngine::choose() {
  switch (random_.below(4)) {
    case 0:
      return Moment::at_once;
    case 1:
      return Moment::later;
    default:
      return Moment::last;
  }
}

void AsyncEngine::schedule(const TaskHandle& task) {
  due_.push_back({now_ + 1 + random_.below(64), task});
  std::push_heap(due_.begin(), due_.end());
}

TaskHandle AsyncEngine::start(std::function<void()> effect) {
  auto task = std::make_shared<Task>(Task{std::move(effect)});
  switch (choose()) {
    case Moment::at_once:
      task->finish();
      break;
    case Moment::later:
      schedule(task);
      break;
    case Moment::last:
      break;
  }
  return task;
}

void AsyncEngine::start_signalling(std::function<void()> effect) {
  auto task = std::make_shared<Task>(Task{std::move(effect)});
  const Moment moment = choose();
  if (moment == Moment::at_once) return task->finish();
  if (moment == Moment::later) schedule(task);
  signalling_.push_back(std::move(task));
}

void AsyncEngine::advance() {
  ++now_;
  while (!due_.empty() && due_.front().time <= now_) {
    std::pop_heap(due_.begin(), due_.end());
    const TaskHandle task = std::move(due_.back().task);
    due_.pop_back();
    task->finish();
  }
}

bool AsyncEngine::run_one() {
  std::erase_if(signalling_, [](const TaskHandle& task) { return task->done; });
  if (signalling_.empty()) return false;
  const std::size_t chosen = random_.below(static_cast<std::uint32_t>(signalling_.size()));
  const TaskHandle task = std::move(signalling_[chosen]);
  signalling_.erase(signalling_.begin() + static_cast<std::ptrdiff_t>(chosen));
  task->finish();
  return true;
}

}  // namespace flash_attention::emulator
