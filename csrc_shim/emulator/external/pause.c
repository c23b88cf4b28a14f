/* An operation runs under its stream's lock (inline mode) or under emu_order (queues). So no operation runs while a
 * thread holds all these locks. */
#include "emulator/external/pause.h"

#include "emulator/state.h"
#include "emulator/work/queue.h"
#include "emulator/work/stream_list.h"

void emu_pause(void) {
  emu_streams_lock();
  for (struct CUstream_st *stream = emu_streams; stream; stream = stream->next)
    pthread_mutex_lock(&stream->lock);
  for (uint32_t index = 0; index < emu.config.num_devices; index++)
    pthread_mutex_lock(&emu.devices[index].legacy.lock);
  pthread_mutex_lock(&emu_order);
}

void emu_resume(void) {
  pthread_mutex_unlock(&emu_order);
  for (uint32_t index = 0; index < emu.config.num_devices; index++)
    pthread_mutex_unlock(&emu.devices[index].legacy.lock);
  for (struct CUstream_st *stream = emu_streams; stream; stream = stream->next)
    pthread_mutex_unlock(&stream->lock);
  emu_streams_unlock();
}
