#include "device/retired.h"

#include "device/order.h"
#include "device/wait.h"

/* Takes from the list the resources whose work has finished. The caller holds the pool's lock. */
static ocp_retired *take_finished(const ocp_device *device) {
  ocp_retired *finished = NULL;
  const bool is_lost = atomic_load(&device->lost) != CUDA_SUCCESS;
  for (ocp_retired **link = &device->pool->retired; *link;) {
    ocp_retired *retired = *link;
    if (is_lost || ocp_pool_is_finished(device->pool, /*stream_id=*/0, retired->position, /*taker=*/NULL)) {
      *link = retired->next;
      retired->next = finished;
      finished = retired;
    } else {
      link = &retired->next;
    }
  }
  return finished;
}

void ocp_release_retired(ocp_device *device) {
  ocp_pool *pool = device->pool;
  pthread_mutex_lock(&pool->lock);
  const bool any = pool->retired != NULL;
  pthread_mutex_unlock(&pool->lock);
  if (!any)
    return;
  OCP_STAY stay = ocp_device_enter_to_release(device);
  if (!stay.entered)
    return;
  ocp_pool_poll(device);
  pthread_mutex_lock(&pool->lock);
  ocp_retired *finished = take_finished(device);
  pthread_mutex_unlock(&pool->lock);
  while (finished) {
    ocp_retired *next = finished->next;
    finished->release(finished);
    finished = next;
  }
}

void ocp_retire(ocp_device *device, ocp_retired *retired, void (*release)(ocp_retired *self)) {
  ocp_pool *pool = device->pool;
  retired->release = release;
  pthread_mutex_lock(&pool->lock);
  retired->position = pool->sequence;
  retired->next = pool->retired;
  pool->retired = retired;
  pthread_mutex_unlock(&pool->lock);
  ocp_release_retired(device);
}
